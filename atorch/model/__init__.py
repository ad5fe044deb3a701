"""A model as an object: its structure, copies of it, its state, and replacements in place."""
