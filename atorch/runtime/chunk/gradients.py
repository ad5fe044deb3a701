"""Moves gradients as soon as backward has them: to the host, whole, or to every process its share of the average.

They travel beside computation where the transfer can. The memory of one is free again when the next one comes, as it
was foreseen (`trace`, `course.moments`), and when backward returns the host has all of them.

Processes that share chunks reduce them chunk by chunk: gradients are put together on the device, and when a chunk's are
complete each process receives the average of its share (`reduce_scatter`). Chunks are reduced in one order, that in
which they were foreseen to be complete, so that processes meet even where a batch leaves some parameters out on some of
them. What nobody had a gradient for has none afterwards: one small message at the end of backward tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from atorch.distributed.collectives import reduce_scatter_single
from atorch.runtime.chunk.memory import ChunkSet, Keep
from atorch.runtime.chunk.rounds import Rounds
from atorch.runtime.chunk.schedule.layout import ChunkLayout, ChunkSlot
from atorch.runtime.chunk.transfer import Transfer, Wait, put
from atorch.runtime.data_parallel.collective_order import BACKWARD_ENDS, REDUCES, CollectiveEvent, reduce_zeros


def completion(layout: ChunkLayout, gradients: Sequence[str]) -> list[int]:
    """Trainable chunks in the order in which their last gradient is there; those that get none come last."""
    arrival = {name: position for position, name in enumerate(gradients)}
    last = {
        chunk.index: max(arrival.get(slot.name, len(arrival)) for slot in chunk.slots)
        for chunk in layout.chunks
        if chunk.trainable
    }
    return sorted(last, key=lambda chunk: (last[chunk], chunk))


class GradientSink:
    """Takes gradients to where their chunks are kept."""

    def __init__(self, chunks: ChunkSet, slots: Mapping[str, ChunkSlot], transfer: Transfer) -> None:
        self._chunks, self._slots, self._transfer = chunks, slots, transfer
        self._leaving: list[tuple[Tensor, Wait]] = []  # on their way, and until when their memory is taken
        self._under_way = False
        self._missing: dict[int, set[str]] = {}  # of chunks, parameters whose gradients are still to come
        self.complete: Callable[[int, Wait], None] | None = None
        """Is told of a chunk all of whose parameters have their gradients, and how to wait until the host has them."""

    def begin(self) -> None:
        """A pass begins; what a backward pass that raised has left is dropped."""
        self.settle()
        self._missing.clear()
        self._under_way = False

    def arrived(self, name: str, chunk: int, gradient: Tensor) -> None:
        """Backward has the whole gradient of a parameter."""
        if not self._under_way:
            self._under_way = True
            queue: Any = Variable._execution_engine
            queue.queue_callback(self._finish)
        self._take(name, chunk, gradient)

    def settle(self) -> None:
        """Wait until all that has come may be looked at."""
        self._let_go()
        self._transfer.settle()

    def _take(self, name: str, chunk: int, gradient: Tensor) -> None:
        self._let_go()
        memory = self._chunks.chunks[chunk]
        memory.accumulate(self._slots[name], gradient, self._way(chunk))
        missing = self._missing.setdefault(chunk, {slot.name for slot in memory.spec.slots})
        missing.discard(name)
        if not missing and self.complete is not None and chunk not in self._chunks.on_device:
            self.complete(chunk, self._transfer.kept())

    def _finish(self) -> None:
        self.settle()
        self._under_way = False

    def _way(self, chunk: int) -> Keep:
        return put if chunk in self._chunks.on_device else self._send

    def _send(self, target: Tensor, source: Tensor, add: bool) -> None:
        wait = self._transfer.keep(target, source, add)
        if wait is not None:
            self._leaving.append((source, wait))

    def _let_go(self) -> None:
        while self._leaving:
            _, wait = self._leaving.pop()
            wait()


class SharedGradients(GradientSink):
    """Takes each process its share of the average.

    Args:
        foreseen: names of parameters in the order in which their gradients come.
        replicas: processes that keep the same share of other copies of the chunks; None for one copy.
        rounds: are told of reductions before they are issued.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        slots: Mapping[str, ChunkSlot],
        transfer: Transfer,
        foreseen: Sequence[str],
        replicas: dist.ProcessGroup | None,
        rounds: Rounds,
    ) -> None:
        super().__init__(chunks, slots, transfer)
        self._replicas, self._rounds = replicas, rounds
        rounds.reduce = self._reduce_complete
        self._order = completion(chunks.layout, foreseen)
        self._names = list(slots)
        self.begin()

    def begin(self) -> None:
        """No chunk has gradients. One with a parameter that nothing was foreseen for waits for the end of backward."""
        super().begin()
        self._missing = {chunk: {slot.name for slot in self._chunks.chunks[chunk].spec.slots} for chunk in self._order}
        self._waiting = list(self._order)
        self._open: dict[int, Tensor] = {}
        self._come: set[str] = set()
        self._had: dict[int, set[str]] = {}

    def _take(self, name: str, chunk: int, gradient: Tensor) -> None:
        """Put it to its chunk's others; reduce what is complete."""
        memory = self._chunks.chunks[chunk]
        if chunk not in self._open:
            self._open[chunk] = self._zeros(chunk)
        memory.whole(self._open[chunk], self._slots[name]).copy_(gradient)
        self._come.add(name)
        self._missing[chunk].discard(name)
        if not self._rounds.are_held:
            while self._waiting and not self._missing[self._waiting[0]]:
                self._reduce(self._waiting.pop(0))
        elif chunk in self._waiting[:1] and not self._missing[chunk]:
            self._rounds.meet()

    def _reduce_complete(self) -> None:
        """In a round: reduce what all processes have."""
        late = self._anywhere([bool(self._missing[chunk]) for chunk in self._waiting])
        while self._waiting and not late.pop(0):
            self._reduce(self._waiting.pop(0))

    def _finish(self) -> None:
        """Backward is over: reduce the rest, and learn what had gradients anywhere."""
        self._missing = {chunk: set() for chunk in self._order}
        self._rounds.drain()
        for chunk in self._waiting:
            self._reduce(chunk)
        self._rounds.come_to(BACKWARD_ENDS)
        has = self._anywhere([name in self._come for name in self._names])
        anywhere = {name for name, each in zip(self._names, has, strict=True) if each}
        self._chunks.reduced |= anywhere
        for chunk, had in self._had.items():
            memory = self._chunks.chunks[chunk]
            memory.has_gradient = had | {slot.name for slot in memory.spec.slots if slot.name in anywhere}
        self.begin()  # which waits for what is on its way

    def _anywhere(self, flags: list[bool]) -> list[int]:
        """For each flag, whether any process has set it."""
        if self._rounds.order is not None:
            return self._rounds.order.any_of(flags)  # on the host where it can: nobody waits for the device
        come = torch.tensor(flags, dtype=torch.uint8, device=self._chunks.device)
        dist.all_reduce(come, dist.ReduceOp.MAX, group=self._chunks.group)
        if self._replicas is not None:
            dist.all_reduce(come, dist.ReduceOp.MAX, group=self._replicas)
        return come.tolist()

    def _reduce(self, chunk: int) -> None:
        memory = self._chunks.chunks[chunk]
        assert self._chunks.group is not None
        like = len(memory.compute), memory.spec.numel, memory.dtype, self._chunks.device, self._chunks.group
        self._rounds.come_to(
            CollectiveEvent(REDUCES, str(memory.spec), memory.spec.numel, in_backward=True),
            partial(reduce_zeros, *like, dist.ReduceOp.AVG, self._replicas),
        )
        whole = self._open.pop(chunk, None)
        if whole is None:
            whole = self._zeros(chunk)
        share = torch.empty_like(whole[memory.share])
        reduce_scatter_single(share, whole, dist.ReduceOp.AVG, group=self._chunks.group)
        if self._replicas is not None:
            dist.all_reduce(share, dist.ReduceOp.AVG, group=self._replicas)
        self._had[chunk] = set(memory.has_gradient)
        self._let_go()
        memory.accumulate_share(share, [slot.name for slot in memory.spec.slots], self._way(chunk))

    def _zeros(self, chunk: int) -> Tensor:
        memory = self._chunks.chunks[chunk]
        return torch.zeros(memory.spec.numel, dtype=memory.dtype, device=self._chunks.device)
