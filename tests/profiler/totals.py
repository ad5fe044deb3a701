"""Figures of a whole model."""

from atorch.cost import ModelProfile


def total(profile: ModelProfile, figure: str) -> float:
    """A figure of all copies of all segments."""
    return sum(segment.count * getattr(segment, figure) for segment in profile.segments)
