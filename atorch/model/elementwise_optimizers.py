"""Optimizers that step every element of a parameter from that element and its own gradient alone.

Their step of a slice is the slice of their step, so states can be stored, and steps computed, slice by slice.
"""

from __future__ import annotations

from typing import Any

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def is_elementwise(optimizer: Any) -> bool:
    """True for exact classes of torch in `ELEMENTWISE`; subclasses may override the step."""
    return type(optimizer) in ELEMENTWISE
