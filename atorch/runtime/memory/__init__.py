"""Less device memory: recomputation, micro-batches, and states or activations on the host."""
