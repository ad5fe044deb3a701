"""Choosing a strategy: trace, estimate, dry-run."""
