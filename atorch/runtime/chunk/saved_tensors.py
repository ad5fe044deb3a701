"""Handles that replace tensors in managed memory which operations save for backward.

A tensor that an operation saves keeps its memory alive until backward. So a saved tensor in managed memory is replaced
by its place there, and fetched when backward reads it. Other tensors go to the hooks that were already active, so that
activation checkpointing and activation offload work as usual.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Handle(NamedTuple):
    """A saved tensor that lies in managed memory."""

    place: Any  # the owner's key for the memory
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the beginning of the memory

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, as a view of its fetched memory."""
        return memory.as_strided(self.size, self.stride, self.offset)


class Owner(Protocol):
    """An owner of managed memory."""

    def place_of(self, tensor: Tensor) -> Any:
        """The owner's key for the tensor's memory; None for other memory."""
        ...

    def restored(self, handle: Handle) -> Tensor:
        """The tensor, for the running backward node."""
        ...


def saved_as_handles(owner: Owner) -> saved_tensors_hooks:
    """A context for one operation, which saves tensors in the owner's memory as handles."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            place = owner.place_of(tensor)
            if place is not None:
                return Handle(place, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            # Detached, since an operation that saves its own output would be in a reference cycle with it.
            return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            return owner.restored(packed)
        tensor: Tensor = packed if outer is None else outer[1](packed)
        return tensor

    return saved_tensors_hooks(pack, unpack)
