"""Optimizers, precision and sharded data parallelism of `smp`."""
