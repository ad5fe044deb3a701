"""Gradients: norms and clipping over processes, guards, and samples for comparison."""
