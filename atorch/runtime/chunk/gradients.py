"""Where gradients go as soon as backward has them: to the host, whole, or every process its share of the average.

Processes that share chunks reduce them chunk by chunk: gradients are put together on the device, and when a chunk's are
complete each process receives the average of its share (`reduce_scatter`). Chunks are reduced in one order, that in
which they were foreseen to be complete, so that processes meet even where a batch leaves some parameters out on some of
them. What nobody had a gradient for has none afterwards: one small message at the end of backward tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from atorch.runtime.chunk.layout import Layout, Slot
from atorch.runtime.chunk.memory import ChunkSet


def completion(layout: Layout, gradients: Sequence[str]) -> list[int]:
    """Trainable chunks in the order in which their last gradient is there; those that get none come last."""
    arrival = {name: position for position, name in enumerate(gradients)}
    last = {
        chunk.index: max(arrival.get(slot.name, len(arrival)) for slot in chunk.slots)
        for chunk in layout.chunks
        if chunk.trainable
    }
    return sorted(last, key=lambda chunk: (last[chunk], chunk))


class Gradients:
    """Takes gradients to the chunks' host memory."""

    def __init__(self, chunks: ChunkSet, slots: Mapping[str, Slot]) -> None:
        self._chunks, self._slots = chunks, slots

    def begin(self) -> None:
        """A pass begins; what a backward pass that raised has left is dropped."""

    def arrived(self, name: str, chunk: int, gradient: Tensor) -> None:
        """Backward has the whole gradient of a parameter."""
        self._chunks.chunks[chunk].accumulate(self._slots[name], gradient)


class SharedGradients(Gradients):
    """Takes each process its share of the average.

    Args:
        foreseen: names of parameters in the order in which their gradients come.
        replicas: processes that keep the same share of other copies of the chunks; None for one copy.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        slots: Mapping[str, Slot],
        foreseen: Sequence[str],
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(chunks, slots)
        self._replicas = replicas
        self._order = completion(chunks.layout, foreseen)
        self._numbers = {name: number for number, name in enumerate(slots)}
        self.begin()

    def begin(self) -> None:
        """No chunk has gradients. One with a parameter that nothing was foreseen for waits for the end of backward."""
        self._missing = {chunk: {slot.name for slot in self._chunks.chunks[chunk].spec.slots} for chunk in self._order}
        self._waiting = list(self._order)
        self._open: dict[int, Tensor] = {}
        self._come: set[str] = set()
        self._had: dict[int, set[str]] = {}

    def arrived(self, name: str, chunk: int, gradient: Tensor) -> None:
        """Put it to its chunk's others; reduce what is complete."""
        if not self._come:
            queue: Any = Variable._execution_engine
            queue.queue_callback(self._finish)
        memory = self._chunks.chunks[chunk]
        if chunk not in self._open:
            self._open[chunk] = self._zeros(chunk)
        memory.whole(self._open[chunk], self._slots[name]).copy_(gradient)
        self._come.add(name)
        self._missing[chunk].discard(name)
        while self._waiting and not self._missing[self._waiting[0]]:
            self._reduce(self._waiting.pop(0))

    def _finish(self) -> None:
        """Backward is over: reduce the rest, and learn what had gradients anywhere."""
        for chunk in self._waiting:
            self._reduce(chunk)
        come = torch.zeros(len(self._numbers), dtype=torch.uint8, device=self._chunks.device)
        come[[self._numbers[name] for name in self._come]] = 1
        dist.all_reduce(come, dist.ReduceOp.MAX, group=self._chunks.group)
        if self._replicas is not None:
            dist.all_reduce(come, dist.ReduceOp.MAX, group=self._replicas)
        anywhere = {name for name, number in self._numbers.items() if come[number]}
        for chunk, had in self._had.items():
            memory = self._chunks.chunks[chunk]
            memory.has_gradient = had | {slot.name for slot in memory.spec.slots if slot.name in anywhere}
        self.begin()

    def _reduce(self, chunk: int) -> None:
        memory = self._chunks.chunks[chunk]
        whole = self._open.pop(chunk, None)
        if whole is None:
            whole = self._zeros(chunk)
        share = torch.empty_like(whole[memory.share])
        dist.reduce_scatter_tensor(share, whole, dist.ReduceOp.AVG, group=self._chunks.group)
        if self._replicas is not None:
            dist.all_reduce(share, dist.ReduceOp.AVG, group=self._replicas)
        self._had[chunk] = set(memory.has_gradient)
        memory.accumulate_share(share, [slot.name for slot in memory.spec.slots])

    def _zeros(self, chunk: int) -> Tensor:
        memory = self._chunks.chunks[chunk]
        return torch.zeros(memory.spec.numel, dtype=memory.dtype, device=self._chunks.device)
