"""Automatic acceleration: strategies, their methods, the planner, and `auto_accelerate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atorch.auto.accelerate import auto_accelerate, plan

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

__all__ = ["Strategy", "auto_accelerate", "plan"]


def __getattr__(name: str) -> Any:
    if name == "Strategy":
        from atorch.auto.strategy import Strategy

        return Strategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
