"""Handles in place of what operations save of managed memory for backward.

A tensor that an operation saves keeps its memory alive until backward. What is saved of memory that somebody manages is
replaced by where it lies there, and fetched when backward reads it. Everything else goes to the hooks that were in
force, so that activation checkpointing and activation offload work as they do without this.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Handle(NamedTuple):
    """A saved tensor that lies in managed memory."""

    place: Any  # what the owner knows the memory by
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the beginning of the memory

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, in memory that is here again."""
        return memory.as_strided(self.size, self.stride, self.offset)


class Owner(Protocol):
    """An owner of managed memory."""

    def place_of(self, tensor: Tensor) -> Any:
        """The owner's name for the tensor's memory; None where that is not its own."""
        ...

    def restored(self, handle: Handle) -> Tensor:
        """The tensor, for the node of the backward pass that runs."""
        ...


def saved_as_handles(owner: Owner) -> saved_tensors_hooks:
    """A context for one operation: what it saves of the owner's memory is saved as a handle."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            place = owner.place_of(tensor)
            if place is not None:
                return Handle(place, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            # A tensor that an operation saves of its own output would hold the operation, which holds it.
            return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            return owner.restored(packed)
        tensor: Tensor = packed if outer is None else outer[1](packed)
        return tensor

    return saved_tensors_hooks(pack, unpack)
