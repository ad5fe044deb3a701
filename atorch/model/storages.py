"""The memory that tensors view: copies of it in which views of one memory stay so, and giving it up for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atorch.model.copy import lazy_clone


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a plain tensor; None where values lie otherwise: sparse tensors, tensors that wrap others."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided or tensor.is_nested:
        return None
    return None if tensor.is_meta or tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage()


class OwnMemory:
    """Copies of tensors with the same strides, on copies of their storages, each of which is copied once.

    Args:
        lazily: whether memory on a device is shared instead, until either side writes.
        values: where the values of some storages are, by their `_cdata`; see `emptied`.
    """

    def __init__(
        self, lazily: Callable[[torch.device], bool], values: Mapping[int, torch.UntypedStorage] | None = None
    ) -> None:
        self._lazily, self._values = lazily, values or {}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # with what they are copies of

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, which takes no part in autograd."""
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
    """Give those whose own elements share memory, as expanded ones do, a place for each: they can be written then.

    One that is a view of another of `tensors` stays that.
    """
    found = [(each, storage) for each in tensors if (storage := storage_of(each)) is not None]
    num_views = Counter(storage._cdata for _, storage in found)
    for tensor, storage in found:
        if num_views[storage._cdata] == 1 and torch._debug_has_internal_overlap(tensor) == 1:
            tensor.data = tensor.detach().contiguous()


@contextmanager
def emptied(tensors: Iterable[Tensor]) -> Iterator[Mapping[int, torch.UntypedStorage]]:
    """While inside, the memory of `tensors` holds nothing; yields copies of it in host memory.

    Afterwards the values are back, for every tensor that views that memory. What cannot be resized, such as memory
    shared with another library, stays.
    """
    found = {each._cdata: each for each in map(storage_of, tensors) if each is not None and each.resizable()}
    kept = {key: torch.UntypedStorage(each.nbytes()).copy_(each) for key, each in found.items()}
    for storage in found.values():
        storage.resize_(0)
    try:
        yield kept
    finally:
        for key, storage in found.items():
            storage.resize_(kept[key].nbytes())
            storage.copy_(kept[key])
