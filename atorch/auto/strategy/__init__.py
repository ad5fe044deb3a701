"""Strategies: what they are made of, how they are checked, how they are kept."""

from atorch.auto.strategy.method import EXACTNESS, METHODS, RECIPES, Exactness, Method, Phase, Recipe, method
from atorch.auto.strategy.strategy import Strategy

__all__ = ["EXACTNESS", "METHODS", "RECIPES", "Exactness", "Method", "Phase", "Recipe", "Strategy", "method"]
