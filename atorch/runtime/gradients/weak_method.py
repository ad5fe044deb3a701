"""Methods as hooks of tensors that do not keep their object alive.

What runs once a gradient has accumulated is held by C++, where Python's garbage collector does not look: an object that
reaches the tensor on which its method is such a hook would never be freed, with all that it holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method `method`; it does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
