"""Chooses a strategy: scores compositions, dry-runs the most promising, keeps the fastest."""
