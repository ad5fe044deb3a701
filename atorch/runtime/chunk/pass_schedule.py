"""A training pass as an ordered list of operations that need chunks, as traced and as run, and unrolled to more blocks.

While a pass follows its trace, it takes the scheduled steps. Once it deviates, chunks are fetched on demand and the
least recently used ones are evicted, until the pass ends.

The pass of a model with many similar blocks follows from passes of the same model with fewer. A pass is cut where it
first takes a parameter of each period of blocks, in forward and again in backward. A deeper model repeats one stretch
of forward and one of backward with other names, and the bytes at each instant grow linearly. So two depths give the
growth, and a third confirms it. The maximum over an operation's instants is taken last, since the instant of the
maximum moves with depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
        extras = Uses(traced, chunk_of).gathered_bytes(np.array(list(chunk_of.values())), gathering, shards).tolist()
    return [
        ScheduleStep(_label(access), frozenset([chunk_of[p] for p in access.parameters]), access.other_bytes + extra)
        for access, extra in zip(traced.accesses, extras, strict=True)
    ]


class Uses:
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
        """Bytes at each access of gradient buffers, and of the share that was reduced last."""
        end, chunks = len(self._other_bytes), chunk_of[self._come]
        first, last = np.full(len(gathering), -1), np.full(len(gathering), -1)
        order = np.zeros(len(gathering), dtype=np.int64)
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
    strayed: bool = False
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
            self.strayed = self.strayed or torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
            return None
        return self.schedule.steps[position]

    @property
    def other_bytes(self) -> int:
        """Bytes except chunks at the current operation, as traced there; after a deviation the maximum of the pass."""
        if self.on_schedule and 0 < len(self.seen) <= len(self.moments):
            return self.moments[len(self.seen) - 1].other_bytes
        return max((moment.other_bytes for moment in self.moments), default=0)


WARM, ENDS = 2, 2
"""Periods of the first and of the last blocks, which may differ from those between."""
FEWEST = WARM + 1 + ENDS
"""Periods of the shallowest usable model."""
_FORWARD, _BACKWARD = 1 + WARM, 2 * FEWEST - 1 - WARM
"""The stretches of the shallowest model that deeper ones repeat."""

Rename = Callable[[str, int], str]
_Numbers = np.ndarray[Any, Any]
_Origin = tuple[int, int]


class PassStretch(NamedTuple):
    """Consecutive operations and gradients of a pass."""

    events: list[tuple[str | None, frozenset[str]]]
    """Operations with their parameters; gradients have the name None."""
    instants: list[Sequence[int]]
    """For each operation, the bytes except parameters at each instant until the next one."""

    def renamed(self, periods: int, rename: Rename) -> list[tuple[str | None, frozenset[str]]]:
        """The events of the same stretch so many periods later."""
        if not periods:
            return self.events
        return [(operation, frozenset([rename(name, periods) for name in names])) for operation, names in self.events]

    @property
    def num_bytes(self) -> _Numbers:
        return np.array([size for sizes in self.instants for size in sizes], dtype=np.int64)

    @property
    def firsts(self) -> list[int]:
        """The first instant of each operation, and the number of all instants."""
        return [0, *accumulate(map(len, self.instants))]


def stretches(
    traced: AccessTrace, instants: Sequence[Sequence[int]], num_periods: int, period_of: Callable[[str], int | None]
) -> list[PassStretch]:
    """A pass, cut where each period begins in forward, and each but the last in backward.

    Args:
        instants: for each operation, the bytes except parameters at each instant until the next one.
        period_of: the number of a parameter's period; None outside of the repeated blocks.
    """
    starts = [*range(num_periods), *reversed(range(num_periods - 1))]
    made, arrived = [PassStretch([], [])], 0
    for index, access in enumerate(traced.accesses):
        if starts and starts[0] in map(period_of, access.parameters):
            made.append(PassStretch([], []))
            del starts[0]
        made[-1].events.append((access.operation, access.parameters))
        made[-1].instants.append(instants[index])
        while arrived < len(traced.gradients) and traced.gradients[arrived][0] <= index + 1:
            made[-1].events.append((None, frozenset((traced.gradients[arrived][1],))))
            arrived += 1
    return made


def deeper(passes: Sequence[Sequence[PassStretch]], rename: Rename, periods: int) -> AccessTrace | None:
    """The pass of a model with `periods` more periods than the first of three; None if it does not follow from them.

    Args:
        passes: of three models, of FEWEST periods and of one and two more.
        rename: maps a parameter's name to that of its counterpart so many periods later. Names outside the repeated
            blocks map to themselves.
        periods: additional periods, compared with the first model.
    """
    first = passes[0]
    sizes: list[dict[_Origin, _Numbers]] = []
    for more, made in enumerate(passes):
        if len(made) != len(_origins(more)):
            return None
        for (number, later), stretch in zip(_origins(more), made, strict=True):
            if stretch.events != first[number].renamed(later, rename) or stretch.firsts != first[number].firsts:
                return None
        sizes.append({origin: stretch.num_bytes for origin, stretch in zip(_origins(more), made, strict=True)})

    def grown(number: int, later: int, more: int) -> _Numbers:
        """The bytes of a stretch in a pass with `more` more periods."""
        now, then = sizes[0][number, 0], sizes[1][number, int(_FORWARD < number < _BACKWARD)]
        is_repeated = number in (_FORWARD, _BACKWARD)
        by_later = sizes[1][number, 1] - then if is_repeated else np.zeros_like(now)
        num_bytes: _Numbers = now + more * (then - now) + later * by_later
        return num_bytes

    if any(not np.array_equal(num_bytes, grown(*origin, 2)) for origin, num_bytes in sizes[2].items()):
        return None
    accesses: list[Access] = []
    gradients: list[tuple[int, str]] = []
    for number, later in _origins(periods):
        firsts = first[number].firsts[:-1]
        most = iter(np.maximum.reduceat(grown(number, later, periods), firsts).tolist() if firsts else ())
        for operation, names in first[number].renamed(later, rename):
            if operation is None:
                gradients += [(len(accesses), name) for name in names]
            else:
                accesses.append(Access(operation, names, next(most)))
    return AccessTrace(accesses, gradients)


def _origins(more: int) -> list[_Origin]:
    """The origin of each stretch of a pass with `more` more periods: its number in the first pass, and periods later.

    The last period of forward and of backward are one stretch, with what lies between them.
    """
    return [
        *((number, 0) for number in range(_FORWARD)),
        *((_FORWARD, later) for later in range(more + 1)),
        *((number, more) for number in range(_FORWARD + 1, _BACKWARD)),
        *((_BACKWARD, later) for later in reversed(range(more + 1))),
        *((number, 0) for number in range(_BACKWARD + 1, 2 * FEWEST)),
    ]
