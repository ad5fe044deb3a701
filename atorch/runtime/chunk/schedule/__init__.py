"""Schedules of chunks: their layout, the passes that are foreseen, and transfers under a byte budget."""
