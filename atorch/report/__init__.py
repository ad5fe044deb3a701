"""Pictures of what was found, for people: renderables and strings from plain data."""
