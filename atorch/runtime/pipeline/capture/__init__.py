"""Capture of a model for a pipeline: what its units hand over, and where it is cut."""
