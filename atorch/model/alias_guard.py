"""Detects runs of a copy that reach tensors of the original model.

Copies follow every reference, but not names that are looked up during a run, such as global variables and class
attributes. A run through such a name would put gradients into the user's model, or write its buffers.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.errors import ArgumentError
from atorch.model.pytree import tensors_in, written_tensors

_DETACHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_NOT_THE_USERS = ("torch.", "atorch.")


class OriginalReachedError(ArgumentError):
    """A copy of the model reached the original model."""


class Originals(TorchDispatchMode):
    """Forbids gradients of `model`'s parameters, and writes to its tensors, while a copy of it runs inside.

    Gradients of other tensors outside of the copy are restored afterwards.

    Raises:
        OriginalReachedError: immediately, and again on exit even if user code caught it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = {id(module) for module in model.modules()}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names = {_storage(tensor): name for name, tensor in tensors if _has_storage(tensor)}
        self._kept = [tensor for _, tensor in tensors]  # keeps storages alive, so their addresses are not reused
        self._others: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}
        self._fault: OriginalReachedError | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            for held, gradient in self._others.values():
                tensor = held()
                if tensor is not None:
                    tensor.grad = gradient
        if self._fault is not None:
            raise self._fault

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            if _has_storage(tensor):
                self._check(func, tensor, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, tensor: Tensor, args: Any, kwargs: Any) -> None:
        name = self._names.get(_storage(tensor))
        is_for_gradient = tensor.requires_grad and torch.is_grad_enabled() and func not in _DETACHING
        written = written_tensors(func, args, kwargs)
        if name is not None and (is_for_gradient or any(other is tensor for other in written)):
            self._fault = self._fault or OriginalReachedError(
                f"{self._user()} reaches {name} of the model itself, by a global variable or a class attribute. Passes "
                "are traced and strategies tried on copies of the model, which follow its attributes, closures and "
                "default arguments, but no name that is looked up in a run: keep what is reached as an attribute of "
                "the module that uses it, or give a load_strategy that runs nothing beforehand, such as ddp or fsdp"
            )
            raise self._fault
        if tensor.requires_grad and _is_leaf(tensor) and not is_fake(tensor) and id(tensor) not in self._others:
            self._others[id(tensor)] = weakref.ref(tensor), tensor.grad

    def _user(self) -> str:
        """The name of the innermost user function that is not a method of the original's modules."""
        for frame in _frames():
            first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
            owner = frame.f_locals.get(*first) if first else None
            if id(owner) not in self._modules:
                name = frame.f_code.co_name
                return f"{type(owner).__name__}.{name}" if isinstance(owner, nn.Module) else name
        return "the model"


def _frames() -> Iterator[types.FrameType]:
    """Frames of the call stack outside of torch and this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_NOT_THE_USERS):
            yield frame
        frame = frame.f_back


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _storage(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a no_grad view of a tensor written since: torch cannot recompute its gradient function
        return False
