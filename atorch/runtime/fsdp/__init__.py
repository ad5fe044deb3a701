"""Fully sharded data parallelism on torch's FSDP2."""
