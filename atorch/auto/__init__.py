"""Automatic acceleration: strategies, the methods they are made of, the planner, and `auto_accelerate`."""

from atorch.auto import opt_lib as opt_lib  # registers the methods
from atorch.auto.accelerate import auto_accelerate, plan
from atorch.auto.strategy import Strategy

__all__ = ["Strategy", "auto_accelerate", "plan"]
