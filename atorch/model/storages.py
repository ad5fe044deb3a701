"""Storages of tensors: copies that preserve shared views, and temporary release of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atorch.model.copy import lazy_clone


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain dense tensor; None for others, such as sparse tensors and wrapper subclasses."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided or tensor.is_nested:
        return None
    return None if tensor.is_meta or tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage()


class OwnMemory:
    """Copies tensors with the same strides on copied storages; each storage is copied once.

    Args:
        lazily: returns True for devices whose memory is shared until either side writes.
        values: storages that hold the values of emptied ones, by their `_cdata`; see `emptied`.
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


def separate(tensors: Iterable[Tensor]) -> None:
    """Make tensors whose own elements share memory, such as expanded ones, contiguous, so they can be written.

    A tensor that shares its storage with another of `tensors` stays as it is.
    """
    views = [(tensor, storage) for tensor in tensors if (storage := storage_of(tensor)) is not None]
    num_views = Counter(storage._cdata for _, storage in views)
    for tensor, storage in views:
        if num_views[storage._cdata] == 1 and torch._debug_has_internal_overlap(tensor) == 1:
            tensor.data = tensor.detach().contiguous()


@contextmanager
def emptied(tensors: Iterable[Tensor]) -> Iterator[Mapping[int, torch.UntypedStorage]]:
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
