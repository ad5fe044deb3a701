"""Figures of a whole model."""

from atorch.cost import ModelProfile


def total(profile: ModelProfile, figure: str) -> float:
    return sum(segment.count * getattr(segment, figure) for segment in profile.segments)
