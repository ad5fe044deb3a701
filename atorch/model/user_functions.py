"""Types of functions that users pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

LossFunc = Callable[[Any, Any], Any]
"""(batch, output) → a scalar loss, or a sequence whose first item is one."""
MakeOptimizer = Callable[[Any], Optimizer]
"""Parameters or parameter groups → optimizer."""
