"""Losses: their value, how they reduce over samples, and losses of logits that are never whole."""
