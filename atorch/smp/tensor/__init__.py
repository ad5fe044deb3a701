"""Tensor parallelism of `smp`: marks, replacements and splits."""
