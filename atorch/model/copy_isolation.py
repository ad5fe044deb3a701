"""Copies kept apart from the original model: memory of their own, and a guard against runs that reach its tensors.

Copies follow every reference, but not names that are looked up during a run, such as global variables and class
attributes. A run through such a name would put gradients into the user's model, or write its buffers.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.errors import ArgumentError
from atorch.model.copy import lazy_clone
from atorch.model.pytree import tensors_in, written_tensors


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain dense tensor; None for others, such as sparse tensors and wrapper subclasses."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided or tensor.is_nested:
        return None
    return None if tensor.is_meta or tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage()


class OwnMemory:
    """Copies tensors with the same strides on copied storages; each storage is copied once.

    Args:
        lazily: returns True for devices whose memory is shared until either side writes.
        values: storages that hold the values of released ones, by their `_cdata`; see `released`.
    """

    def __init__(
        self, lazily: Callable[[torch.device], bool], values: Mapping[int, torch.UntypedStorage] | None = None
    ) -> None:
        self._lazily, self._values = lazily, values or {}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # (copy, original)

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, detached from autograd."""
        tensor = tensor.detach()
        storage = storage_of(tensor)
        if storage is None:
            return tensor.clone()
        key = storage._cdata
        if key in self._values:
            return lazy_clone(_on(self._values[key], tensor))
        if self._lazily(tensor.device):
            return lazy_clone(tensor)
        if key not in self._copies:
            self._copies[key] = storage.clone(), storage
        return _on(self._copies[key][0], tensor)


def _on(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """A view like `tensor` on another storage."""
    view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def make_writable(tensors: Iterable[Tensor]) -> None:
    """Make tensors whose own elements share memory, such as expanded ones, contiguous, so they can be written.

    A tensor that shares its storage with another of `tensors` stays as it is.
    """
    views = [(tensor, storage) for tensor in tensors if (storage := storage_of(tensor)) is not None]
    num_views = Counter(storage._cdata for _, storage in views)
    for tensor, storage in views:
        if num_views[storage._cdata] == 1 and torch._debug_has_internal_overlap(tensor) == 1:
            tensor.data = tensor.detach().contiguous()


@contextmanager
def released(tensors: Iterable[Tensor]) -> Iterator[Mapping[int, torch.UntypedStorage]]:
    """Release the memory of `tensors` inside; yields copies of it in host memory.

    Afterwards the values are restored for every tensor that views that memory. Memory that cannot be resized, such as
    memory shared with another library, stays.
    """
    storages = (storage for storage in map(storage_of, tensors) if storage is not None)
    by_key = {storage._cdata: storage for storage in storages if storage.resizable()}
    kept = {key: torch.UntypedStorage(storage.nbytes()).copy_(storage) for key, storage in by_key.items()}
    for storage in by_key.values():
        storage.resize_(0)
    try:
        yield kept
    finally:
        for key, storage in by_key.items():
            storage.resize_(kept[key].nbytes())
            storage.copy_(kept[key])


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
                "are traced and strategies tried on copies of the model. Copies follow attributes, closures and "
                "default arguments, but no name that is looked up in a run. Keep what is reached as an attribute of "
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
