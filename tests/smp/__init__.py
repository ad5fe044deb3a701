"""Tests of PatrickStar's door."""
