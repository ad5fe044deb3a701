"""Capture of a model at work: its operations, segments and equal blocks."""
