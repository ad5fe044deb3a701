"""The step of `smp`: its exchanges, its micro-batches, and gradient averaging."""
