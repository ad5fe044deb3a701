"""The optimizers that are known to step every element of a parameter by that element and its own gradient alone.

Their step of a slice is the slice of their step, so states can be kept, and steps be taken, wherever it is convenient.
"""

from __future__ import annotations

from typing import Any

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def is_elementwise(optimizer: Any) -> bool:
    """True if it is one of torch's own that are known to; none that inherits is."""
    return type(optimizer) in ELEMENTWISE
