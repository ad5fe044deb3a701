"""Files read and written safely: paths, strict JSON, configurations, and weights."""
