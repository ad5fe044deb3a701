"""The machine as the planner sees it: its specification, the catalogue of known ones, and cluster files."""
