"""Strategies: their methods, their checks and their files."""

from atorch.auto.strategy.method import (
    METHODS,
    PRECISION_LEVELS,
    RECIPES,
    Method,
    Phase,
    PrecisionLevel,
    Recipe,
    method,
)
from atorch.auto.strategy.strategy import Strategy

__all__ = [
    "PRECISION_LEVELS",
    "METHODS",
    "RECIPES",
    "PrecisionLevel",
    "Method",
    "Phase",
    "Recipe",
    "Strategy",
    "method",
]
