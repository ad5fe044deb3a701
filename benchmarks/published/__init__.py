"""Runs that others measured and published, and what the planner says of them."""
