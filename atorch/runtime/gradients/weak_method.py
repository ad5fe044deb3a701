"""Methods as tensor hooks that do not keep their object alive.

C++ holds post-accumulate hooks, which Python's garbage collector cannot see. So an object that refers to a tensor on
which its own method is such a hook would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method `method`, which does nothing once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return call
