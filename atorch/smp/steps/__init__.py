"""The step of `smp`: its handshake, its micro-batches, and the averaging of gradients."""
