"""Changes of a module's behaviour under its own names: transparent wrappers, and members overridden in place.

Wrappers such as DistributedDataParallel prefix every name with `module.` and hide the attributes of the wrapped module.
A class that inherits from `Wrapper` first has the names, state dicts and attributes of `self.module`.

An override gives the module a subclass of its class, with the same name. So `state_dict`, attributes and `isinstance`
are unchanged, nothing refers back to the module, and a deepcopy or pickle has the override too.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn


class Wrapper(nn.Module):
    """Base of wrappers: `self.module` is the user's module, and the wrapper uses its names."""

    module: nn.Module
    is_transparent: ClassVar[bool] = True
    """True if assigned attributes are the module's; False for wrappers that users know, with their `module`."""

    @property
    def training(self) -> bool:
        """The mode of the user's module, which wrapping does not change."""
        module = self.__dict__.get("_modules", {}).get("module")
        return True if module is None else bool(module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None:  # None while nn.Module's constructor sets the default
            module.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # read before the constructor has set it
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            self._assign(name, value)

    def _is_own(self, name: str) -> bool:
        """True for attributes of the wrapper; constructors set `module` last, and all others are the module's."""
        module = vars(self).get("_modules", {}).get("module")
        is_property = isinstance(getattr(type(self), name, None), property)
        if module is None or not self.is_transparent or is_property or name in vars(self) or name in self._modules:
            return True
        return name.startswith("_") and name not in vars(module)  # such as nn.Module's

    def _assign(self, name: str, value: Any) -> None:
        """Set an attribute of the user's module, whose forward reads it there."""
        held: Any
        for held in (self.module._parameters, self.module._buffers):
            if name in held and isinstance(value, torch.Tensor):
                held[name] = value  # torch.func.functional_call sets tensors temporarily
                return
        setattr(self.module, name, value)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's modules by the user's names; `named_parameters` and `named_buffers` use this."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names that tell torch.distributed.checkpoint to omit the prefix `module`."""
        return {"module": "module"} | {name: "module" for name, _ in self.module.named_children()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delegate to the user's module, which may store gradients elsewhere."""
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the user's module, by the user's names."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Give the user's module its entries, where a module that contains the wrapper loads (as AveragedModel)."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


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
