"""Strategies: their methods, their checks and their files."""

from atorch.auto.strategy.method import METHODS, PRECISIONS, RECIPES, Method, Phase, PrecisionLevel, Recipe, method
from atorch.auto.strategy.strategy import Strategy

__all__ = ["PRECISIONS", "METHODS", "RECIPES", "PrecisionLevel", "Method", "Phase", "Recipe", "Strategy", "method"]
