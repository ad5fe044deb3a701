"""Checkpoints of `smp`: partial and full files, tagged folders, and atomic saves."""
