"""Derivation of the splits of a block from the block itself, and their validation on copies."""
