"""Reports for people: renderables and strings from plain data."""
