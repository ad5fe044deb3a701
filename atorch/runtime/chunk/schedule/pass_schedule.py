"""A pass of training as operations that need chunks, in order: as it was foreseen, and as it goes.

While a pass goes as foreseen, its steps are those that were scheduled. Where it takes another path, chunks are fetched
as they are needed and the least recently used make way, until the pass ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from atorch.runtime.chunk.schedule.transfer_schedule import ScheduleStep, StepRuns, StepTransfers, TransferSchedule


class Access(NamedTuple):
    """One operation, and what it takes."""

    operation: str
    parameters: frozenset[str]
    other_bytes: int
    """The most bytes of everything but parameters, from this operation to the next."""


class AccessTrace(NamedTuple):
    """A forward and backward pass: its operations, and where gradients come."""

    accesses: Sequence[Access]
    gradients: Sequence[tuple[int, str]]
    """The number of accesses that were before, and the parameter; in order."""
    varies: bool = False
    """True if processes may take ways of their own: values decide, or they have been seen to."""


def moments(
    foreseen: AccessTrace, chunk_of: Mapping[str, int], gathering: Sequence[int] = (), shards: int = 1
) -> list[ScheduleStep]:
    """The accesses by chunk.

    Args:
        gathering: bytes of each chunk's gradients where they are put together before they are reduced: they live from
            the first to the last, or to the end where some of a chunk's parameters get none.
        shards: the processes that reduce them. A share of the average lives from then on until the next one is there.
    """
    held = [0] * len(foreseen.accesses)
    if gathering:
        held = Uses(foreseen, chunk_of).gathered_bytes(np.array(list(chunk_of.values())), gathering, shards).tolist()
    return [
        ScheduleStep(_said(each), frozenset([chunk_of[name] for name in each.parameters]), each.other_bytes + more)
        for each, more in zip(foreseen.accesses, held, strict=True)
    ]


class Uses:
    """A pass in arrays, from which the runs of any layout are soon made.

    Args:
        foreseen: the pass.
        names: of all parameters; they are known by their places in it.
    """

    def __init__(self, foreseen: AccessTrace, names: Iterable[str]) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        lengths = [len(each.parameters) for each in foreseen.accesses]
        used = [numbers[name] for each in foreseen.accesses for name in each.parameters]
        self._used = np.array(used, dtype=np.int64)
        self._by = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)  # the access of each use
        self._other_bytes = np.array([each.other_bytes for each in foreseen.accesses], dtype=np.int64)
        self._come = np.array([numbers[name] for _, name in foreseen.gradients], dtype=np.int64)
        self._positions = np.array([position for position, _ in foreseen.gradients], dtype=np.int64)
        self.used = np.unique(self._used)
        """Numbers of the parameters that some operation takes."""

    def runs(self, chunk_of: np.ndarray[Any, Any], gathering: Sequence[int] = (), shards: int = 1) -> StepRuns:
        """The accesses by chunk, as `moments` has them, with those that need the same ones taken together.

        Args:
            chunk_of: the chunk of each parameter.
            gathering, shards: as of `moments`.
        """
        other = self._other_bytes
        if not len(other):
            return StepRuns([], [], [], [])
        if gathering:
            other = other + self.gathered_bytes(chunk_of, gathering, shards)
        num_chunks = int(chunk_of.max()) + 1
        keys = np.sort(self._by * num_chunks + chunk_of[self._used], kind="stable")  # nearly sorted already
        keys = keys[np.append(True, keys[1:] != keys[:-1])]
        by, chunks = np.divmod(keys, num_chunks)
        lengths = np.bincount(by, minlength=len(other))
        begins = np.append(0, lengths.cumsum())
        before = np.append(lengths[0], lengths[:-1])
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
        """Bytes of gradients that are put together at each access, and of the share that was reduced last."""
        end, chunks = len(self._other_bytes), chunk_of[self._come]
        first, last = np.full(len(gathering), -1), np.full(len(gathering), -1)
        order = np.zeros(len(gathering), dtype=np.int64)
        first[chunks[::-1]], order[chunks[::-1]] = self._positions[::-1], np.arange(len(chunks))[::-1]
        last[chunks] = self._positions
        is_missing = np.ones(len(chunk_of), dtype=bool)
        is_missing[self._come] = False
        last[chunk_of[is_missing]] = end  # nobody knows before the end that no more will come
        alive = np.flatnonzero(first >= 0)
        change = np.zeros(end + 1, dtype=np.int64)
        latest = share = 0
        for chunk in alive[np.lexsort((order[alive], last[alive]))].tolist():
            until = max(latest, int(last[chunk]))  # chunks are reduced in the order in which they are complete
            change[max(0, latest - 1)] += share
            change[until] -= share
            change[max(0, int(first[chunk]) - 1)] += gathering[chunk]
            change[until] -= gathering[chunk]
            latest, share = until, gathering[chunk] // shards
        change[max(0, latest - 1)] += share
        summed: np.ndarray[Any, Any] = change.cumsum()[:-1]
        return summed


def _said(access: Access) -> str:
    first, *others = sorted(access.parameters)
    return f"{access.operation} of {first}" + (f" and {len(others)} more" if others else "")


class Nodes:
    """Things given to the node of the backward pass that runs, which stay until it is done.

    A node asks for what it saved one by one, and a checkpoint computes again inside of one of these requests.
    """

    def __init__(self) -> None:
        self._running: tuple[int, ...] = ()
        self._given: frozenset[Any] = frozenset()

    def given(self) -> frozenset[Any]:
        """Things that the running node has; none outside of a backward pass."""
        running = _running_node()
        if running != self._running:
            self._running, self._given = running, frozenset()
        return self._given

    def give(self, thing: Any) -> None:
        """The node that runs has `thing`, too."""
        self._given = self.given() | {thing}


class HeldViews:
    """Views that operations made and somebody holds, by the parameter, or chunk, in whose memory they lie."""

    def __init__(self) -> None:
        self._of: dict[Any, set[int]] = {}  # nothing whose views are gone: most are, and all are asked for often

    def add(self, owner: Any, view: torch.Tensor) -> None:
        self._of.setdefault(owner, set()).add(id(view))
        weakref.finalize(view, self._gone, owner, id(view))

    def held(self) -> Collection[Any]:
        return tuple(self._of)

    def _gone(self, owner: Any, view: int) -> None:
        views = self._of.get(owner, set())
        views.discard(view)
        if not views:
            self._of.pop(owner, None)


def _running_node() -> tuple[int, ...]:
    """Numbers by which a node is known: who keeps one keeps the parameters that its graph leads to."""
    node = torch._C._current_autograd_node()
    return () if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


@dataclass
class PassSchedule:
    """Follows a schedule, and notes what is needed when."""

    moments: Sequence[ScheduleStep]
    schedule: TransferSchedule | None
    varies: bool = False
    strayed: bool = False
    """True if a pass of training left the course."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seen: list[tuple[str, frozenset[int]]] = []
        self.on_course = self.schedule is not None

    def next(self, operation: str, needs: frozenset[int]) -> StepTransfers | None:
        """The step before an operation that needs these chunks; None off course."""
        position = len(self.seen)
        self.seen.append((operation, needs))
        if position >= len(self.moments):
            return None  # the pass is over, and somebody looks at a parameter
        self.on_course = self.on_course and self.moments[position].needs == needs
        if not self.on_course:
            self.strayed = self.strayed or torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
            return None
        assert self.schedule is not None
        return self.schedule.steps[position]

    @property
    def other_bytes(self) -> int:
        """Bytes of all else at the operation under way: as foreseen there, or anywhere."""
        if self.on_course and 0 < len(self.seen) <= len(self.moments):
            return self.moments[len(self.seen) - 1].other_bytes
        return max((each.other_bytes for each in self.moments), default=0)
