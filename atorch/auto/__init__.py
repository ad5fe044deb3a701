"""Automatic acceleration: strategies, the methods they are made of, the planner, and `auto_accelerate`."""
