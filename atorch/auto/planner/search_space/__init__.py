"""Search over the tree of legal compositions, with lower bounds of their seconds and bytes."""
