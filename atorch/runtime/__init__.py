"""Mechanisms: each file is usable by hand, with torch alone."""
