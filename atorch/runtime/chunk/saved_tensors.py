"""Handles that replace tensors in managed memory which operations save for backward.

A tensor that an operation saves keeps its memory alive until backward. So a saved tensor in managed memory is replaced
by its place there, and fetched when backward reads it. Other tensors go to the hooks that were already active, so that
activation checkpointing and activation offload work as usual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.runtime.chunk.compiled import CompiledModules
from atorch.runtime.chunk.parameter import Managed
from atorch.runtime.chunk.schedule.pass_schedule import Nodes


class Handle(NamedTuple):
    """A saved tensor that lies in a parameter's memory."""

    name: str  # of the parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements, from the beginning of the memory

    def within(self, memory: Tensor) -> Tensor:
        """The tensor, as a view of its fetched memory."""
        return memory.as_strided(self.size, self.stride, self.offset)


class Owner(ABC):
    """An owner of parameters' memory, who provides what each operation needs.

    These are the parameters that it takes, those of the running backward node, and those of which a view is alive.
    """

    def __init__(self, compiled: CompiledModules) -> None:
        self.compiled = compiled
        self._nodes = Nodes()
        self._views: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()  # those alive, with their parameters

    @abstractmethod
    def name_of(self, tensor: Tensor) -> str | None:
        """The parameter in whose memory a tensor lies; None for other memory."""

    @abstractmethod
    def provide(self, operation: str, names: frozenset[str]) -> None:
        """Provide the parameters that an operation needs, before it runs."""

    @abstractmethod
    def memory_of(self, name: str) -> Tensor:
        """The memory in which a provided parameter lies."""

    @abstractmethod
    def show(self, name: str, view: Tensor) -> None:
        """Let operations on a view of a parameter come to this owner."""

    def need(self, operation: str, names: frozenset[str]) -> None:
        """Provide what an operation on these parameters needs."""
        needs = self.compiled.needs(names)
        if needs is not None:
            held = self._views.values() if self._views else ()  # often there are none, and `values` is slow
            self.provide(operation, needs.union(self._nodes.given(), held))

    def restored(self, handle: Handle) -> Tensor:
        """A saved tensor for the running backward node; its parameter stays until the next node."""
        self.need(f"{torch._C._current_autograd_node().name()} (backward)", frozenset((handle.name,)))
        if handle.name not in self.compiled:
            self._nodes.give(handle.name)
        return handle.within(self.memory_of(handle.name))

    def watch(self, result: Any) -> None:
        """Note the views of parameters in the result of an operation."""
        if isinstance(result, (list, tuple)):
            for item in result:
                self.watch(item)
        elif isinstance(result, Tensor) and not isinstance(result, (nn.Parameter, Managed)):
            name = self.name_of(result)
            if name is not None:
                self.show(name, result)
                if name not in self.compiled:  # views inside compiled code are not visible outside
                    self._views[result] = name


def saved_as_handles(owner: Owner) -> saved_tensors_hooks:
    """A context for one operation, which saves tensors in the owner's memory as handles."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            name = owner.name_of(tensor)
            if name is not None:
                return Handle(name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            # Detached, since an operation that saves its own output would be in a reference cycle with it.
            return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Handle):
            return owner.restored(packed)
        tensor: Tensor = packed if outer is None else outer[1](packed)
        return tensor

    return saved_tensors_hooks(pack, unpack)
