"""Runs that others measured and published, and the planner's estimates of them."""
