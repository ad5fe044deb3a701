"""The set of chunks on the compute device, kept right while a model runs.

Before an operation runs its chunks are brought, and they stay while it does; what else stays, leaves or is brought
early is the schedule's business (`course`). Leaving is dropping a buffer: nothing of ours refers to it, since what
operations saved are handles, and nothing has to travel back. A weak reference tells whether somebody else holds the
memory all the same; it counts until nobody does.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atorch.distributed.collectives import all_gather_single
from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk.memory import ChunkMemory, ChunkSet
from atorch.runtime.chunk.memory_ledger import MemoryLedger
from atorch.runtime.chunk.parameter import point
from atorch.runtime.chunk.rounds import Rounds
from atorch.runtime.chunk.schedule.pass_schedule import PassSchedule
from atorch.runtime.chunk.transfer import Transfer, Wait, nothing
from atorch.runtime.data_parallel.collective_order import CollectiveEvent, gather_zeros
from atorch.units import format_bytes

LETTING_GO_S = 0.5  # many times what gloo's threads were seen to take on a busy machine, 26 ms


class Observer(Protocol):
    """A listener to what moves."""

    def moved(self, chunk: int, on_device: bool, num_bytes: int) -> None:
        """A chunk came to the device, or left it."""
        ...


class Residency:
    """Brings chunks to `device` and drops them, within a budget.

    Args:
        chunks: what the host keeps, and the device for good.
        parameters: those that the chunks hold, by name.
        budget_bytes: of the device, for chunks and everything else that lives while operations run.
        staying: chunks that the device has for good.
        beside_bytes: what else it has for good: gradients and states, shares of chunks.
        rounds: of processes that share the chunks, told of what is gathered before it is.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        parameters: Mapping[str, nn.Parameter],
        budget_bytes: int,
        course: PassSchedule,
        transfer: Transfer,
        staying: Collection[int] = (),
        beside_bytes: int = 0,
        rounds: Rounds | None = None,
    ) -> None:
        self.chunks, self.course = chunks, course
        self.tier = MemoryLedger("device budget", budget_bytes)
        self.fetched_bytes = self.peak_bytes = 0
        self.observer: Observer | None = None
        self._parameters, self._transfer, self._rounds = parameters, transfer, rounds or Rounds(chunks, None)
        self._away = {
            name: parameter.data for name, parameter in parameters.items()
        }  # what shows while values are away
        self._here: dict[int, Tensor] = {}  # by chunk, the least recently needed first: its buffer on the device
        self._made: dict[int, int] = {}  # by chunk: at which count of the host's writes
        self._coming: dict[int, Wait] = {}
        self._at: dict[int, int] = {}  # the storage of a buffer → its chunk
        self._stays = frozenset(staying)
        self.tier.take(beside_bytes, "gradients and states that stay")
        for chunk in staying:
            self._keep(chunk)
        self._held: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []  # dropped, and alive in other hands

    def _keep(self, chunk: int) -> None:
        self.tier.take(self._num_bytes(chunk), f"chunk {chunk}, which stays")
        self._show(chunk, self.chunks.chunks[chunk].compute)

    def begin(self) -> None:
        """A pass begins: drop what an earlier one has left, and follow what was written on the host."""
        for chunk in list(self._here):
            self._drop(chunk)
        for memory in self.chunks.chunks:
            memory.prepare()
        self.course.begin()

    def need(self, operation: str, chunks: frozenset[int]) -> None:
        """Bring chunks, for an operation that is about to run.

        Raises:
            OutOfBudgetError: there is no room for them, which can only be where a pass is not as it was foreseen.
        """
        step = self.course.next(operation, chunks)
        for chunk in sorted(chunks):
            self._drop_stale(chunk)
        if step is None:
            self._bring_on_demand(chunks)
        else:
            for chunk in step.evict:
                self._drop(chunk)
            for chunk in (*step.fetch, *step.prefetch, *sorted(chunks)):
                self._fetch(chunk)
        for chunk in chunks:
            self._arrive(chunk)
        self.peak_bytes = max(self.peak_bytes, self.tier.used_bytes + self.course.other_bytes)

    def buffer(self, chunk: int) -> Tensor:
        """A chunk that is here, flat."""
        return self._here[chunk]

    def chunk_at(self, tensor: Tensor) -> int | None:
        """The chunk in whose buffer a tensor lies."""
        if tensor.layout != torch.strided:
            return None
        return self._at.get(tensor.untyped_storage()._cdata)

    def write_back(self, chunk: int) -> None:
        """Somebody wrote into a chunk's buffer: let the host have it."""
        memory = self.chunks.chunks[chunk]
        if chunk not in self._stays:
            memory.compute.copy_(self._here[chunk][memory.share])
        memory.follow()
        self._made[chunk] = memory.writes

    def _drop_stale(self, chunk: int) -> None:
        """Drop a buffer of which the host has other values by now: a step, or somebody by hand, wrote them."""
        memory = self.chunks.chunks[chunk]
        memory.follow()
        if chunk in self._here and self._made[chunk] != memory.writes:
            self._drop(chunk)

    def _bring_on_demand(self, chunks: frozenset[int]) -> None:
        missing = [chunk for chunk in chunks if chunk not in self._here]
        needed = sum(self._num_bytes(chunk) for chunk in missing)
        for chunk in [each for each in self._here if each not in chunks and each not in self._stays]:
            room = self._room()
            # What others hold leaves at another moment on each process, and processes that share chunks drop the same:
            # it counts as room. Look after the room was: what has gone by then is in that already.
            others = 0 if self._rounds.order is None else sum(size for _, size in self._held)
            if room + others >= needed:
                break
            self._drop(chunk)
        for chunk in missing:
            self._fetch(chunk)
        for chunk in chunks:  # the most recently used one is last
            if chunk in self._here:
                self._here[chunk] = self._here.pop(chunk)

    def _room(self) -> int:
        self._strike_freed()
        assert self.tier.budget_bytes is not None
        return self.tier.budget_bytes - self.tier.used_bytes - self.course.other_bytes

    def _fetch(self, chunk: int) -> None:
        if chunk in self._here:
            return
        memory, num_bytes = self.chunks.chunks[chunk], self._num_bytes(chunk)
        if num_bytes > self._room():
            self._wait_for_threads(num_bytes)
        fits = num_bytes <= self._room()
        if self.chunks.group is not None:
            self._come_to("gathers" if fits else "has no room for", memory)
        if not fits:
            raise OutOfBudgetError(self._too_much(chunk, num_bytes))
        self.tier.take(num_bytes, f"chunk {chunk}")
        buffer = torch.empty(memory.spec.numel, dtype=memory.dtype, device=self.chunks.device)
        self._coming[chunk] = self._bring(buffer, memory)
        self._show(chunk, buffer)
        self.fetched_bytes += num_bytes
        if self.observer is not None:
            self.observer.moved(chunk, True, num_bytes)

    def _come_to(self, action: str, memory: ChunkMemory) -> None:
        assert self.chunks.group is not None
        like = memory.spec.numel, len(memory.compute), memory.dtype, self.chunks.device, self.chunks.group
        in_backward = torch._C._current_graph_task_id() != -1
        step = CollectiveEvent(
            action, str(memory.spec), memory.spec.numel, in_backward, is_compared=action != "gathers"
        )
        self._rounds.come_to(step, partial(gather_zeros, *like))

    def _wait_for_threads(self, num_bytes: int) -> None:
        """A thread that gathered a chunk lets go of it a little after it said that it was there."""
        until = time.monotonic() + LETTING_GO_S
        while self._held and num_bytes > self._room() and time.monotonic() < until:
            time.sleep(1e-4)

    def _bring(self, buffer: Tensor, memory: ChunkMemory) -> Wait:
        """Begin to fill a buffer: with what the host has, and with what other processes have."""
        if self.chunks.group is None:
            return self._transfer.start(buffer, memory.compute)
        if self._rounds.are_held:
            self._rounds.meet(memory.spec.index, buffer)
            return nothing
        if buffer.device == memory.compute.device:
            work: Any = all_gather_single(buffer, memory.compute, group=self.chunks.group, async_op=True)
        else:
            mine = buffer[memory.share]
            with self._transfer.ahead(mine, memory.compute):
                work = all_gather_single(buffer, mine, group=self.chunks.group, async_op=True)
        wait: Wait = work.wait
        return wait

    def _show(self, chunk: int, buffer: Tensor) -> None:
        """A chunk's parameters have their values in `buffer`."""
        memory = self.chunks.chunks[chunk]
        self._here[chunk], self._made[chunk] = buffer, memory.writes
        self._at[buffer.untyped_storage()._cdata] = chunk
        for slot in memory.spec.slots:
            point(self._parameters[slot.name], memory.whole(buffer, slot))

    def _arrive(self, chunk: int) -> None:
        wait = self._coming.pop(chunk, None)
        if wait is not None:
            wait()

    def _drop(self, chunk: int) -> None:
        buffer = None if chunk in self._stays else self._here.pop(chunk, None)
        if buffer is None:
            return
        self._arrive(chunk)
        memory, storage = self.chunks.chunks[chunk], buffer.untyped_storage()
        for slot in memory.spec.slots:
            point(self._parameters[slot.name], self._away[slot.name])
        del self._at[storage._cdata]
        self._held.append((weakref.ref(storage), self._num_bytes(chunk)))
        del buffer, storage
        self._strike_freed()
        if self.observer is not None:
            self.observer.moved(chunk, False, self._num_bytes(chunk))

    def _strike_freed(self) -> None:
        """Give back what was dropped and nobody holds any more."""
        for held in [each for each in self._held if each[0]() is None]:
            self._held.remove(held)
            self.tier.give(held[1])

    def _num_bytes(self, chunk: int) -> int:
        memory = self.chunks.chunks[chunk]
        return memory.spec.numel * memory.compute.element_size()

    def _too_much(self, chunk: int, num_bytes: int) -> str:
        operation = self.course.seen[-1][0] if self.course.seen else "an operation"
        clinging = sum(size for _, size in self._held)
        hint = (
            f"; {format_bytes(clinging)} of chunks that should be gone are held by tensors that the model keeps"
            if clinging
            else ""
        )
        return (
            f"{operation} needs chunk {chunk}, {format_bytes(num_bytes)}, and {format_bytes(max(0, self._room()))} are "
            f"left of {format_bytes(self.tier.budget_bytes or 0)}, of which other tensors take up to "
            f"{format_bytes(self.course.other_bytes)}{hint}. This pass differs from the one that was foreseen; raise "
            "the budget, or make batches smaller"
        )
