"""Schedules of chunks: their layout, traces of passes, and transfers under a byte budget."""
