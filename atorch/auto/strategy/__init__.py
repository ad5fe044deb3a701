"""Strategies: their methods, their checks and their files."""

from atorch.auto.strategy.method import EXACTNESS, METHODS, RECIPES, Exactness, Method, Phase, Recipe, method
from atorch.auto.strategy.strategy import Strategy

__all__ = ["EXACTNESS", "METHODS", "RECIPES", "Exactness", "Method", "Phase", "Recipe", "Strategy", "method"]
