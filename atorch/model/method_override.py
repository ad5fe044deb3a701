"""Overrides a method of one module in place, by a subclass.

The module gets a subclass of its class, with the same name. So `state_dict`, attributes and `isinstance` are unchanged,
nothing refers back to the module, and a deepcopy or pickle has the override too.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Make = Callable[..., Callable[..., Any]]


def override(module: nn.Module, name: str, make: Make, *settings: Any) -> None:
    """Let `module.name` be `make(theirs, *settings)`, where `theirs` is the method of the module's class.

    `make` returns a function of `(self, *args, **kwargs)`. The module can still be pickled if `make` is a module-level
    function and the settings can be pickled. Modules of one class with equal overrides share one subclass.
    """
    base, mark = type(module), (name, make, settings)
    same = (subclass for subclass in base.__subclasses__() if vars(subclass).get(_MARK) == mark)
    module.__class__ = next(same, None) or _subclass(base, name, make, settings)


def lift(module: nn.Module, name: str, make: Make) -> None:
    """Remove the outermost override of the module, if it is this `make` of this method."""
    mark: Any = vars(type(module)).get(_MARK)
    if mark is not None and mark[:2] == (name, make):
        module.__class__ = type(module).__bases__[0]


def is_override(cls: type) -> bool:
    """True if `override` made this class."""
    return _MARK in vars(cls)


_MARK = "__override__"


def _subclass(base: type[nn.Module], name: str, make: Make, settings: tuple[Any, ...]) -> type[nn.Module]:
    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = base.__reduce_ex__(self, protocol)
        rebuild, args, *state = reduced
        if rebuild is copyreg.__newobj__:  # type: ignore[attr-defined]
            args = (base, *args[1:])  # pickle cannot find this class by name
        return (_remake, (rebuild, args, name, make, settings), *state)

    theirs = getattr(base, name)
    namespace: dict[str, Any] = {
        name: functools.wraps(theirs)(make(theirs, *settings)),
        "__reduce_ex__": reduce,
        _MARK: (name, make, settings),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    metaclass: Any = type(base)
    subclass: type[nn.Module] = metaclass(base.__name__, (base,), namespace)
    return subclass


def _remake(
    rebuild: Callable[..., nn.Module], args: Any, name: str, make: Make, settings: tuple[Any, ...]
) -> nn.Module:
    module = rebuild(*args)
    override(module, name, make, *settings)
    return module
