"""Faster replacements of modules, with reports of the modules that were replaced or kept, and the reasons."""
