"""Capture of a model for a pipeline: the tensors that cross between its units, and the cut into stages."""
