"""Results of a loss function: a scalar tensor, or a list or tuple with one first."""

from __future__ import annotations

from typing import Any

import torch


def value_of(loss: Any) -> torch.Tensor:
    value: torch.Tensor = loss[0] if isinstance(loss, (list, tuple)) else loss
    return value


def with_value(loss: Any, value: torch.Tensor) -> Any:
    """`loss` with `value` as its scalar, in the same structure."""
    if not isinstance(loss, (list, tuple)):
        return value
    items = (value, *loss[1:])
    return type(loss)(*items) if hasattr(loss, "_fields") else type(loss)(items)
