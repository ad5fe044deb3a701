"""The set of chunks on the compute device while a model runs.

An operation's chunks are fetched before it runs, and stay until it ends. `pass_schedule` decides which others
stay, leave or are prefetched. To evict a chunk, its buffer is dropped. Operations saved handles, so no reference to it
remains, and nothing has to be copied back. If other code still holds the memory, which a weak reference shows, it
counts as in use until it is freed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atorch.distributed.collectives import all_gather_single
from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk.gradients import GatherRounds
from atorch.runtime.chunk.memory import ChunkMemory, ChunkSet
from atorch.runtime.chunk.parameter import point
from atorch.runtime.chunk.pass_schedule import PassSchedule
from atorch.runtime.chunk.transfer import MemoryLedger, Transfer, Wait, nothing
from atorch.runtime.data_parallel.collective_order import CollectiveEvent, gather_zeros
from atorch.units import format_bytes

LETTING_GO_S = 0.5  # many times the 26 ms that gloo's threads took on a busy machine


Moved = Callable[[int, bool, int], object]
"""Notes that a chunk of so many bytes came to the device (True), or left it."""


class Residency:
    """Fetches chunks to the device and drops them, within a budget.

    Args:
        chunks: the chunks on the host, and those pinned on the device.
        parameters: the chunks' parameters, by name.
        budget_bytes: device memory for chunks and everything else that is live while operations run.
        staying: chunks that always stay on the device.
        beside_bytes: other bytes that always stay there: gradients, states and shares of chunks.
        rounds: puts the all-gathers in one order on all processes that share the chunks.
    """

    def __init__(
        self,
        chunks: ChunkSet,
        parameters: Mapping[str, nn.Parameter],
        budget_bytes: int,
        pass_schedule: PassSchedule,
        transfer: Transfer,
        staying: Collection[int] = (),
        beside_bytes: int = 0,
        rounds: GatherRounds | None = None,
    ) -> None:
        self.chunks, self.pass_schedule = chunks, pass_schedule
        self.tier = MemoryLedger("device budget", budget_bytes)
        self.fetched_bytes = self.peak_bytes = 0
        self.moved: Moved | None = None
        self._parameters, self._transfer, self._rounds = parameters, transfer, rounds or GatherRounds(chunks, None)
        # The placeholders that parameters show while their values are off the device.
        self._away = {name: parameter.data for name, parameter in parameters.items()}
        self._here: dict[int, Tensor] = {}  # buffers on the device by chunk, the least recently needed first
        self._made: dict[int, int] = {}  # by chunk, the count of the host's writes when it was fetched
        self._coming: dict[int, Wait] = {}
        self._at: dict[int, int] = {}  # the storage of a buffer → its chunk
        self._stays = frozenset(staying)
        self.tier.take(beside_bytes, "gradients and states that stay")
        for chunk in staying:
            self.tier.take(self._num_bytes(chunk), f"chunk {chunk}, which stays")
            self._show(chunk, chunks.chunks[chunk].compute)
        self._held: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []  # dropped, but still referenced elsewhere

    def begin(self) -> None:
        """Begin a pass: drop buffers of an earlier one, and take over writes on the host."""
        for chunk in list(self._here):
            self._drop(chunk)
        for memory in self.chunks.chunks:
            memory.prepare()
        self.pass_schedule.begin()

    def need(self, operation: str, chunks: frozenset[int]) -> None:
        """Fetch the chunks of an operation that is about to run.

        Raises:
            OutOfBudgetError: there is no room for them, which happens only if a pass differs from its trace.
        """
        step = self.pass_schedule.next(operation, chunks)
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
        self.peak_bytes = max(self.peak_bytes, self.tier.used_bytes + self.pass_schedule.other_bytes)

    def buffer(self, chunk: int) -> Tensor:
        """The flat buffer of a chunk on the device."""
        return self._here[chunk]

    def chunk_at(self, tensor: Tensor) -> int | None:
        """The chunk in whose buffer a tensor lies; None for other memory."""
        if tensor.layout != torch.strided:
            return None
        return self._at.get(tensor.untyped_storage()._cdata)

    def write_back(self, chunk: int) -> None:
        """Copy writes into a chunk's buffer to the host."""
        memory = self.chunks.chunks[chunk]
        if chunk not in self._stays:
            memory.compute.copy_(self._here[chunk][memory.share])
        memory.follow()
        self._made[chunk] = memory.writes

    def _drop_stale(self, chunk: int) -> None:
        memory = self.chunks.chunks[chunk]
        memory.follow()
        if chunk in self._here and self._made[chunk] != memory.writes:
            self._drop(chunk)

    def _bring_on_demand(self, chunks: frozenset[int]) -> None:
        missing = [chunk for chunk in chunks if chunk not in self._here]
        needed = sum(self._num_bytes(chunk) for chunk in missing)
        for chunk in [resident for resident in self._here if resident not in chunks and resident not in self._stays]:
            room = self._room()
            # Memory held elsewhere is freed at different times on each process, yet all must drop the same chunks.
            # So it counts as room. Sum it after `_room`, which has already credited what was freed.
            held_elsewhere = 0 if self._rounds.order is None else sum(size for _, size in self._held)
            if room + held_elsewhere >= needed:
                break
            self._drop(chunk)
        for chunk in missing:
            self._fetch(chunk)
        for chunk in chunks:  # the most recently used chunk is last
            if chunk in self._here:
                self._here[chunk] = self._here.pop(chunk)

    def _room(self) -> int:
        self._strike_freed()
        assert self.tier.budget_bytes is not None
        return self.tier.budget_bytes - self.tier.used_bytes - self.pass_schedule.other_bytes

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
        if self.moved is not None:
            self.moved(chunk, True, num_bytes)

    def _come_to(self, action: str, memory: ChunkMemory) -> None:
        assert self.chunks.group is not None
        like = memory.spec.numel, len(memory.compute), memory.dtype, self.chunks.device, self.chunks.group
        in_backward = torch._C._current_graph_task_id() != -1
        step = CollectiveEvent(
            action, str(memory.spec), memory.spec.numel, in_backward, is_compared=action != "gathers"
        )
        self._rounds.announce(step, partial(gather_zeros, *like))

    def _wait_for_threads(self, num_bytes: int) -> None:
        """Wait for room: a communication thread releases a chunk's memory shortly after it reports completion."""
        until = time.monotonic() + LETTING_GO_S
        while self._held and num_bytes > self._room() and time.monotonic() < until:
            time.sleep(1e-4)

    def _bring(self, buffer: Tensor, memory: ChunkMemory) -> Wait:
        """Begin to fill a buffer from the host, and from other processes if they share the chunk."""
        if self.chunks.group is None:
            return self._transfer.start(buffer, memory.compute)
        if self._rounds.are_held:
            self._rounds.meet(memory.spec.index, buffer)
            return nothing
        if buffer.device == memory.compute.device:
            work: Any = all_gather_single(buffer, memory.compute, group=self.chunks.group, async_op=True)
        else:
            share = buffer[memory.share]
            with self._transfer.ahead(share, memory.compute):
                work = all_gather_single(buffer, share, group=self.chunks.group, async_op=True)
        wait: Wait = work.wait
        return wait

    def _show(self, chunk: int, buffer: Tensor) -> None:
        """Let a chunk's parameters have their values in `buffer`."""
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
        if self.moved is not None:
            self.moved(chunk, False, self._num_bytes(chunk))

    def _strike_freed(self) -> None:
        """Release the bytes of dropped buffers that nothing references any more."""
        for held in [dropped for dropped in self._held if dropped[0]() is None]:
            self._held.remove(held)
            self.tier.give(held[1])

    def _num_bytes(self, chunk: int) -> int:
        memory = self.chunks.chunks[chunk]
        return memory.spec.numel * memory.compute.element_size()

    def _too_much(self, chunk: int, num_bytes: int) -> str:
        operation = self.pass_schedule.seen[-1][0] if self.pass_schedule.seen else "an operation"
        held = sum(size for _, size in self._held)
        hint = ""
        if held:
            hint = f"; {format_bytes(held)} of chunks that should be gone are held by tensors that the model keeps"
        return (
            f"{operation} needs chunk {chunk}, {format_bytes(num_bytes)}, and {format_bytes(max(0, self._room()))} are "
            f"left of {format_bytes(self.tier.budget_bytes or 0)}, of which other tensors take up to "
            f"{format_bytes(self.pass_schedule.other_bytes)}{hint}. This pass differs from the traced one; raise "
            "the budget, or make batches smaller"
        )
