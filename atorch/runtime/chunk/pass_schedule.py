"""A training pass as an ordered list of operations that need chunks, as traced and as run.

While a pass follows its trace, it takes the scheduled steps. Once it deviates, chunks are fetched on demand and the
least recently used ones are evicted, until the pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from atorch.runtime.chunk.transfer_schedule import ScheduleStep, StepRuns, StepTransfers, TransferSchedule


class Access(NamedTuple):
    """One operation, and the parameters that it takes."""

    operation: str
    parameters: frozenset[str]
    other_bytes: int
    """Peak bytes except parameters, from this operation to the next."""


class AccessTrace(NamedTuple):
    """A forward and backward pass: its operations, and the arrivals of gradients."""

    accesses: Sequence[Access]
    gradients: Sequence[tuple[int, str]]
    """The number of accesses before each gradient, and its parameter; in order."""
    varies: bool = False
    """True if the paths of processes may differ: values decide, or paths were seen to differ."""


def moments(
    traced: AccessTrace, chunk_of: Mapping[str, int], gathering: Sequence[int] = (), shards: int = 1
) -> list[ScheduleStep]:
    """The accesses by chunk.

    Args:
        gathering: bytes of each chunk's gradient buffer, if several processes reduce gradients. The buffer lives from a
            chunk's first gradient to its last, or to the end if some of its parameters get none.
        shards: number of processes that reduce them. The reduced share lives until the next reduction.
    """
    extras = [0] * len(traced.accesses)
    if shards > 1:
        extras = (
            PassArrays(traced, chunk_of).gathered_bytes(np.array(list(chunk_of.values())), gathering, shards).tolist()
        )
    return [
        ScheduleStep(_label(access), frozenset([chunk_of[p] for p in access.parameters]), access.other_bytes + extra)
        for access, extra in zip(traced.accesses, extras, strict=True)
    ]


class PassArrays:
    """A pass as arrays, from which the runs of any layout are quickly computed.

    Args:
        traced: the trace of the pass.
        names: of all parameters; a parameter's number is its position here.
    """

    def __init__(self, traced: AccessTrace, names: Iterable[str]) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        lengths = [len(access.parameters) for access in traced.accesses]
        used = [numbers[name] for access in traced.accesses for name in access.parameters]
        self._used = np.array(used, dtype=np.int64)
        self._by = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)  # the access of each use
        self._other_bytes = np.array([access.other_bytes for access in traced.accesses], dtype=np.int64)
        self._come = np.array([numbers[name] for _, name in traced.gradients], dtype=np.int64)
        self._positions = np.array([position for position, _ in traced.gradients], dtype=np.int64)
        self.used = np.unique(self._used)
        """Numbers of the parameters that any operation takes."""

    def runs(self, chunk_of: np.ndarray[Any, Any], gathering: Sequence[int] = (), shards: int = 1) -> StepRuns:
        """The accesses by chunk, as from `moments`, with consecutive ones that need the same chunks merged.

        Args:
            chunk_of: the chunk of each parameter.
            gathering, shards: as for `moments`.
        """
        other = self._other_bytes
        if not len(other):
            return StepRuns([], [], [], [])
        if shards > 1:
            other = other + self.gathered_bytes(chunk_of, gathering, shards)
        num_chunks = int(chunk_of.max()) + 1
        # One number for each pair of access and chunk, so that sorting puts equal pairs side by side.
        keys = np.sort(self._by * num_chunks + chunk_of[self._used], kind="stable")  # nearly sorted already
        keys = keys[np.append(True, keys[1:] != keys[:-1])]
        by, chunks = np.divmod(keys, num_chunks)
        lengths = np.bincount(by, minlength=len(other))
        begins = np.append(0, lengths.cumsum())
        before = np.append(lengths[0], lengths[:-1])
        # Each chunk is compared with the one at its place in the access before. Two accesses need the same chunks if
        # they have equally many, and the count of differences does not grow within the second.
        differs = np.append(0, (chunks != chunks[np.maximum(np.arange(len(by)) - before[by], 0)]).cumsum())
        is_new = (lengths != before) | (differs[begins[1:]] != differs[begins[:-1]])
        is_new[0] = True
        firsts = np.flatnonzero(is_new)
        listed, lasts = chunks.tolist(), np.append(firsts[1:], len(other)) - 1
        spans = zip(begins[firsts].tolist(), begins[firsts + 1].tolist(), strict=True)
        return StepRuns(
            [frozenset(listed[begin:end]) for begin, end in spans],
            firsts.tolist(),
            np.maximum.reduceat(other, firsts).tolist(),
            other[lasts].tolist(),
        )

    def gathered_bytes(
        self, chunk_of: np.ndarray[Any, Any], gathering: Sequence[int], shards: int
    ) -> np.ndarray[Any, Any]:
        """Bytes at each access of gradient buffers, and of the share that was reduced last."""
        end, chunks = len(self._other_bytes), chunk_of[self._come]
        first, last = np.full(len(gathering), -1), np.full(len(gathering), -1)
        order = np.zeros(len(gathering), dtype=np.int64)
        # If an index repeats, numpy keeps its last write: reversed, that is a chunk's first gradient.
        first[chunks[::-1]], order[chunks[::-1]] = self._positions[::-1], np.arange(len(chunks))[::-1]
        last[chunks] = self._positions
        is_missing = np.ones(len(chunk_of), dtype=bool)
        is_missing[self._come] = False
        last[chunk_of[is_missing]] = end  # only at the end it is certain that no more gradients come
        alive = np.flatnonzero(first >= 0)
        change = np.zeros(end + 1, dtype=np.int64)
        latest = share = 0
        for chunk in alive[np.lexsort((order[alive], last[alive]))].tolist():
            until = max(latest, int(last[chunk]))  # chunks are reduced in their order of completion
            change[max(0, latest - 1)] += share
            change[until] -= share
            change[max(0, int(first[chunk]) - 1)] += gathering[chunk]
            change[until] -= gathering[chunk]
            latest, share = until, gathering[chunk] // shards
        change[max(0, latest - 1)] += share
        summed: np.ndarray[Any, Any] = change.cumsum()[:-1]
        return summed


def _label(access: Access) -> str:
    first, *others = sorted(access.parameters)
    return f"{access.operation} of {first}" + (f" and {len(others)} more" if others else "")


class Nodes:
    """Things given to the running backward node, which stay until it is done.

    A node requests its saved tensors one by one, and a checkpoint recomputes inside one of these requests.
    """

    def __init__(self) -> None:
        self._running: tuple[int, ...] = ()
        self._given: frozenset[Any] = frozenset()

    def given(self) -> frozenset[Any]:
        """Things that the running node has; empty outside of a backward pass."""
        node = torch._C._current_autograd_node()
        # Numbers identify the node, since a reference to it would keep its graph's parameters alive.
        running = () if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())
        if running != self._running:
            self._running, self._given = running, frozenset()
        return self._given

    def give(self, thing: Any) -> None:
        """Give `thing` to the running node."""
        self._given = self.given() | {thing}


@dataclass
class PassSchedule:
    """Follows a schedule, and records the needs of operations."""

    moments: Sequence[ScheduleStep]
    schedule: TransferSchedule
    varies: bool = False
    diverged: bool = False
    """True if a training pass deviated from the schedule."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seen: list[tuple[str, frozenset[int]]] = []
        self.on_schedule = True

    def next(self, operation: str, needs: frozenset[int]) -> StepTransfers | None:
        """The step before an operation that needs these chunks; None after a deviation."""
        position = len(self.seen)
        self.seen.append((operation, needs))
        if position >= len(self.moments):
            return None  # the pass is over, and user code reads a parameter
        self.on_schedule = self.on_schedule and self.moments[position].needs == needs
        if not self.on_schedule:
            self.diverged = self.diverged or torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
            return None
        return self.schedule.steps[position]

    @property
    def other_bytes(self) -> int:
        """Bytes except chunks at the current operation, as traced there; after a deviation the maximum of the pass."""
        if self.on_schedule and 0 < len(self.seen) <= len(self.moments):
            return self.moments[len(self.seen) - 1].other_bytes
        return max((moment.other_bytes for moment in self.moments), default=0)
