"""Mechanisms: each module is usable on its own, with torch alone."""
