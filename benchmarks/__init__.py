"""What atorch claims, measured: one file a claim."""
