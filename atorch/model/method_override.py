"""Overrides members of one module in place, by a subclass.

The module gets a subclass of its class, with the same name. So `state_dict`, attributes and `isinstance` are unchanged,
nothing refers back to the module, and a deepcopy or pickle has the override too.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Make = Callable[..., Callable[..., Any]]
Members = Callable[..., Mapping[str, Any]]


def override(module: Any, name: str, make: Make, *settings: Any) -> None:
    """Let `module.name` be `make(theirs, *settings)`, where `theirs` is the method of the module's class.

    `make` returns a function of `(self, *args, **kwargs)`. The module can still be pickled if `make` is a module-level
    function and the settings can be pickled. Modules of one class with equal overrides share one subclass.
    """
    override_members(module, _method, name, make, *settings)


def override_forward(module: nn.Module, make: Make, *settings: Any) -> None:
    """Override `forward`, or `__call__` where a forward on the instance would hide that of the class."""
    override(module, "__call__" if "forward" in vars(module) else "forward", make, *settings)


def override_members(module: Any, members: Members, *settings: Any) -> None:
    """`override` with any members: the subclass of a class has those of `members(class, *settings)`."""
    base, mark = type(module), (members, *settings)
    same = (subclass for subclass in base.__subclasses__() if vars(subclass).get(_MARK) == mark)
    module.__class__ = next(same, None) or _subclass(base, members, settings)


def lift(module: nn.Module, name: str, make: Make) -> None:
    """Remove the outermost override of the module, if it is this `make` of this method."""
    mark: Any = vars(type(module)).get(_MARK)
    if mark is not None and mark[:3] == (_method, name, make):
        module.__class__ = type(module).__bases__[0]


def lift_forward(module: nn.Module, make: Make) -> None:
    """Undo `override_forward` as `lift` does."""
    lift(module, "forward", make)
    lift(module, "__call__", make)


def is_override(cls: type) -> bool:
    """True if this module made the class."""
    return _MARK in vars(cls)


_MARK = "__override__"


def _method(base: type, name: str, make: Make, *settings: Any) -> Mapping[str, Any]:
    theirs = getattr(base, name)
    return {name: functools.wraps(theirs)(make(theirs, *settings))}


def _subclass(base: Any, members: Members, settings: tuple[Any, ...]) -> type:
    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        rebuild, args, *state = base.__reduce_ex__(self, protocol)
        if rebuild is copyreg.__newobj__:  # type: ignore[attr-defined]
            args = (base, *args[1:])  # pickle cannot find this class by name
        return (_remake, (rebuild, args, members, settings), *state)

    namespace: dict[str, Any] = {
        **members(base, *settings),
        "__reduce_ex__": reduce,
        _MARK: (members, *settings),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    metaclass: Any = type(base)
    subclass: type = metaclass(base.__name__, (base,), namespace)
    return subclass


def _remake(rebuild: Callable[..., Any], args: Any, members: Members, settings: tuple[Any, ...]) -> Any:
    module = rebuild(*args)
    override_members(module, members, *settings)
    return module
