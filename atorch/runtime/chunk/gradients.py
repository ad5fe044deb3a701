"""Moves gradients as soon as backward has them: whole ones to the host, or to each process its share of the average.

Copies overlap computation if the transfer supports it. A gradient's device memory is free again when the next gradient
comes, as the trace assumes (`trace`, `moments`). When backward returns, the host has all gradients.

Processes that share chunks reduce gradients chunk by chunk. The device collects the gradients of a chunk. When they are
complete, each process receives the average of its share (`reduce_scatter`). All processes reduce chunks in the same
order, that of completion in the trace, even if a batch skips some parameters on some of them. A parameter without a
gradient on any process has none afterwards; one small all-reduce at the end of backward finds these.

The host may step a chunk as soon as it has all gradients of its parameters (`EarlySteps`), while backward goes on. The
host's step takes as long as backward on a device, or longer. In return a loop may do less between backward and its
step: chunks refuse to be read (`ChunkMemory.need_whole`), and the optimizer's settings must not change. The first step
is not early, so that a trial pass before training changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from atorch.distributed.collectives import all_gather_single, host_comm_device, reduce_scatter_single
from atorch.errors import ArgumentError
from atorch.runtime.chunk.layout import ChunkLayout
from atorch.runtime.chunk.memory import ChunkMemory, ChunkSet, Keep
from atorch.runtime.chunk.transfer import Transfer, Wait, put
from atorch.runtime.data_parallel.collective_order import (
    BACKWARD_ENDS,
    REDUCES,
    CollectiveEvent,
    CollectiveOrder,
    IssueCollective,
    reduce_zeros,
)

MEETS = CollectiveEvent("is within a pass", is_compared=True)


class GatherRounds:
    """Keeps processes that share chunks in step, by rounds if their paths differ.

    All processes that share a chunk take part in gathering it. Where values decide which modules run (mixtures of
    experts, early exits), no process knows what the others need. So in a round each process announces the chunk that it
    wants, and all send it their shares. All reduce the gradients that are complete everywhere. A process at the end of
    its pass joins further rounds until all processes are at the end.

    Args:
        order: of collectives on these processes and on those with copies of the chunks; None for a single process.
    """

    def __init__(self, chunks: ChunkSet, order: CollectiveOrder | None) -> None:
        self._chunks, self.order = chunks, order
        self.are_held = False
        """True if processes may take different paths; the same on all of them."""
        self.reduce: Callable[[], object] = int
        """Reduces the gradients that are complete on all processes."""

    def follow(self, varies: bool) -> None:
        """Begin a pass, in which the paths of processes differ if it `varies`."""
        self.are_held = varies and self.order is not None

    def announce(self, step: CollectiveEvent, issue_zeros: IssueCollective = list) -> None:
        """Return when `step` is next on all processes (see `CollectiveOrder`); rounds need no such check."""
        if self.order is None or (self.are_held and not step.is_compared):
            return
        self.drain()
        self.order.announce(step, issue_zeros)

    def drain(self) -> None:
        """Return when all processes are at the end of the pass; take part in rounds until then."""
        while self.are_held and self.meet(is_over=True):
            pass

    def meet(self, chunk: int = -1, buffer: Tensor | None = None, *, is_over: bool = False) -> bool:
        """Run a round: fill `buffer` with a chunk, if requested. True if any process is still within a pass."""
        assert self.order is not None
        if not self.order.announce(MEETS, flag=not is_over):
            return False
        group = self._chunks.group
        assert group is not None
        wanted = torch.empty(group.size(), dtype=torch.int64, device=host_comm_device())
        all_gather_single(wanted, wanted.new_tensor([chunk]), group=group)
        for rank, index in enumerate(wanted.tolist()):
            if index >= 0:
                share = self._chunks.chunks[index].compute.to(self._chunks.device)
                parts = list(buffer.chunk(group.size())) if buffer is not None and rank == group.rank() else None
                dist.gather(share, parts, group=group, group_dst=rank)
        self.reduce()
        return True


def completion(layout: ChunkLayout, gradients: Sequence[str]) -> list[int]:
    """Trainable chunks in the order in which their last gradient comes; chunks with missing gradients are last."""
    arrival = {name: position for position, name in enumerate(gradients)}
    last = {
        chunk.index: max(arrival.get(slot.name, len(arrival)) for slot in chunk.slots)
        for chunk in layout.chunks
        if chunk.trainable
    }
    return sorted(last, key=lambda chunk: (last[chunk], chunk))


class GradientSink:
    """Copies gradients to the memory of their chunks."""

    def __init__(self, chunks: ChunkSet, transfer: Transfer) -> None:
        self._chunks, self._transfer = chunks, transfer
        self._leaving: list[tuple[Tensor, Wait]] = []  # under way, with the wait until their memory is free
        self._under_way = False
        self._missing: dict[int, set[str]] = {}  # by chunk, parameters whose gradients are still to come
        self.complete: Callable[[int, Wait], None] | None = None
        """Called with a chunk whose gradients are complete, and the wait until the host has them."""

    def begin(self) -> None:
        """Begin a pass; drop what a failed backward pass left."""
        self.settle()
        self._missing.clear()
        self._under_way = False

    def arrived(self, name: str, chunk: int, gradient: Tensor) -> None:
        """Take the full gradient of a parameter from backward."""
        if not self._under_way:
            self._under_way = True
            queue: Any = Variable._execution_engine
            queue.queue_callback(self._finish)
        self._take(name, chunk, gradient)

    def settle(self) -> None:
        """Wait until all gradients so far may be read."""
        self._release()
        self._transfer.settle()

    def _take(self, name: str, chunk: int, gradient: Tensor) -> None:
        self._release()
        memory = self._chunks.chunks[chunk]
        memory.accumulate(self._chunks.layout.slot_of[name], gradient, self._way(chunk))
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

    def _release(self) -> None:
        while self._leaving:
            _, wait = self._leaving.pop()
            wait()


class SharedGradients(GradientSink):
    """Reduces gradients, so that each process gets its share of the average.

    Args:
        gradient_order: names of parameters in the order in which their gradients come.
        replicas: processes that keep the same share of other copies of the chunks; None for one copy.
        rounds: puts the reductions in one order on all processes.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        transfer: Transfer,
        gradient_order: Sequence[str],
        replicas: dist.ProcessGroup | None,
        rounds: GatherRounds,
    ) -> None:
        super().__init__(chunks, transfer)
        self._replicas, self._rounds = replicas, rounds
        rounds.reduce = self._reduce_complete
        self._order = completion(chunks.layout, gradient_order)
        self._names = list(chunks.layout.slot_of)
        self.begin()

    def begin(self) -> None:
        """Start without gradients. A chunk with a parameter that gets none waits for the end of backward."""
        super().begin()
        self._missing = {chunk: {slot.name for slot in self._chunks.chunks[chunk].spec.slots} for chunk in self._order}
        self._waiting = list(self._order)
        self._open: dict[int, Tensor] = {}
        self._come: set[str] = set()
        self._had: dict[int, set[str]] = {}

    def _take(self, name: str, chunk: int, gradient: Tensor) -> None:
        """Add the gradient to its chunk's buffer, and reduce complete chunks."""
        memory = self._chunks.chunks[chunk]
        if chunk not in self._open:
            self._open[chunk] = self._zeros(chunk)
        memory.whole(self._open[chunk], self._chunks.layout.slot_of[name]).copy_(gradient)
        self._come.add(name)
        self._missing[chunk].discard(name)
        if not self._rounds.are_held:
            while self._waiting and not self._missing[self._waiting[0]]:
                self._reduce(self._waiting.pop(0))
        elif chunk in self._waiting[:1] and not self._missing[chunk]:
            self._rounds.meet()

    def _reduce_complete(self) -> None:
        """In a round, reduce the chunks that are complete on all processes."""
        late = self._anywhere([bool(self._missing[chunk]) for chunk in self._waiting])
        while self._waiting and not late.pop(0):
            self._reduce(self._waiting.pop(0))

    def _finish(self) -> None:
        """End backward: reduce the other chunks, and find the parameters with a gradient on any process."""
        self._missing = {chunk: set() for chunk in self._order}
        self._rounds.drain()
        for chunk in self._waiting:
            self._reduce(chunk)
        self._rounds.announce(BACKWARD_ENDS)
        has = self._anywhere([name in self._come for name in self._names])
        anywhere = {name for name, is_set in zip(self._names, has, strict=True) if is_set}
        self._chunks.reduced |= anywhere
        for chunk, names in self._had.items():
            memory = self._chunks.chunks[chunk]
            memory.has_gradient = names | {slot.name for slot in memory.spec.slots if slot.name in anywhere}
        self.begin()  # also waits for copies under way

    def _anywhere(self, flags: list[bool]) -> list[int]:
        if self._rounds.order is not None:
            return self._rounds.order.any_of(flags)  # on the host if possible, without waiting for the device
        flagged = torch.tensor(flags, dtype=torch.uint8, device=self._chunks.device)
        dist.all_reduce(flagged, dist.ReduceOp.MAX, group=self._chunks.group)
        if self._replicas is not None:
            dist.all_reduce(flagged, dist.ReduceOp.MAX, group=self._replicas)
        return flagged.tolist()

    def _reduce(self, chunk: int) -> None:
        memory = self._chunks.chunks[chunk]
        assert self._chunks.group is not None
        like = len(memory.compute), memory.spec.numel, memory.dtype, self._chunks.device, self._chunks.group
        self._rounds.announce(
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
        self._release()
        memory.accumulate_share(share, [slot.name for slot in memory.spec.slots], self._way(chunk))

    def _zeros(self, chunk: int) -> Tensor:
        memory = self._chunks.chunks[chunk]
        return torch.zeros(memory.spec.numel, dtype=memory.dtype, device=self._chunks.device)


Settings = Sequence[dict[str, Any]]


class EarlySteps:
    """A thread that steps chunks.

    Args:
        gradients: reports chunks whose gradients are complete.
        chunks: all chunks.
        optimizer: its settings apply to a step.
        step: steps a chunk with complete gradients; called on the thread.
    """

    def __init__(
        self,
        gradients: GradientSink,
        chunks: Sequence[ChunkMemory],
        optimizer: Optimizer,
        step: Callable[[ChunkMemory], None],
    ) -> None:
        self._chunks, self._optimizer, self._step = chunks, optimizer, step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stepping")
        self._under_way: list[Future[None]] = []
        self._settings: Settings = []
        self._begins = False  # true from the first `end` on: the next backward pass steps early
        gradients.complete = self._complete

    def end(self) -> None:
        """Wait for the steps in backward. Afterwards chunks may be read, and the next pass steps early.

        Raises:
            ArgumentError: the optimizer's settings changed after these steps began.
        """
        self._begins = True
        while self._under_way:
            self._under_way.pop().result()
            if self._settings != _settings(self._optimizer):
                raise ArgumentError(
                    "the optimizer's settings changed between backward and its step, when chunk's step_in_backward had "
                    "stepped by the earlier ones. Call the scheduler after optim.step(), or leave out step_in_backward"
                )
        for memory in self._chunks:
            memory.is_stepped = False

    def _complete(self, chunk: int, wait: Wait) -> None:
        if not self._begins:
            return
        memory = self._chunks[chunk]
        memory.follow()
        memory.is_stepped = True
        if not self._under_way:
            self._settings = _settings(self._optimizer)
        self._under_way.append(self._thread.submit(self._work, memory, wait))

    @torch.no_grad()
    def _work(self, memory: ChunkMemory, wait: Wait) -> None:
        wait()
        self._step(memory)


def _settings(optimizer: Optimizer) -> Settings:
    """Settings of all groups, with numbers for tensors, which schedulers change in place."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    return [
        {name: plain(value) for name, value in group.items() if name not in ("params", "fused")}
        for group in optimizer.param_groups
    ]
