"""Chunked memory: parameters, gradients and optimizer states that move between device and host under a byte budget."""
