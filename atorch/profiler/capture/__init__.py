"""Capture of a running model: its operations, segments and equal blocks."""
