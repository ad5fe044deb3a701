"""Jobs to plan for that are named instead of given: in a config, in a file, or by a shape."""
