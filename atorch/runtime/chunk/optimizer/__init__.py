"""Optimizers over chunks: slices to step, their states, and steps within backward."""
