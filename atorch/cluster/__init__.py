"""Descriptions of machines for the planner: specifications, the catalogue of known clusters, and cluster files."""
