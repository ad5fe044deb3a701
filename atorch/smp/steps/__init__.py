"""The step of `smp`: its handshake, its micro-batches, and gradient averaging."""
