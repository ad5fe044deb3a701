"""Turns the moments of a step into evictions, fetches and prefetches, under a budget of bytes.

A step reads parameters without writing them. So evicting a chunk is free, and fetching it again costs its bytes.
Between two uses of a chunk is a *gap*. A kept gap takes the chunk's bytes of room at every moment inside it and saves
one fetch. The first pass goes through the moments in order. If kept gaps exceed the room, it drops those that end last
(Belady 1966, *A study of replacement algorithms for a virtual-storage computer*). For equal chunks this fetches least,
even if the room changes between moments, since it selects the most intervals under a capacity. For unequal chunks,
dropping a large one may free more than needed. So a second pass restores gaps that still fit.

A chunk whose gap is not kept leaves the device right after the use before it, which makes room to prefetch others. The
third pass starts each fetch as early as its bytes fit until their use.

Consecutive moments that need the same chunks form a *run*. No gap begins or ends inside a run, so the first two passes
go through runs. If chunks hold many parameters, there are far fewer runs than moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np


class ScheduleStep(NamedTuple):
    """A moment of a training step, at which an operation begins."""

    name: str  # the operation and its phase, for messages
    needs: frozenset[int]  # chunks that must be on the device
    other_bytes: int  # peak bytes on the device except chunks, from here to the next moment


@dataclass(frozen=True)
class StepTransfers:
    """Actions at a moment before its operation runs, in this order."""

    evict: tuple[int, ...] = ()  # chunks that leave the device
    fetch: tuple[int, ...] = ()  # needed now and not on the device, so waited for
    prefetch: tuple[int, ...] = ()  # needed later and started now, in the order of their use


@dataclass(frozen=True)
class TransferSchedule:
    """The transfers of each moment, and their totals."""

    steps: tuple[StepTransfers, ...]
    fetched_bytes: int
    peak_bytes: int  # peak of all bytes on the device

    @property
    def num_fetches(self) -> int:
        """The number of transfers, prefetches included."""
        return sum(len(step.fetch) + len(step.prefetch) for step in self.steps)


@dataclass(frozen=True)
class Shortfall:
    """The moment that exceeds the budget by most, with only its own needs on the device; no schedule keeps it."""

    missing_bytes: int
    moment: ScheduleStep


def schedule(
    moments: Sequence[ScheduleStep],
    chunk_bytes: Sequence[int],
    budget_bytes: int,
    *,
    pinned: frozenset[int] = frozenset(),
    prefetch: int = 1,
) -> TransferSchedule | Shortfall:
    """The transfers that bring every chunk to the device when it is needed, within the device's budget.

    At the beginning only `pinned` chunks are on the device.

    Args:
        moments: of one training step, in order.
        chunk_bytes: of each chunk, by its index.
        budget_bytes: device memory for chunks and everything else.
        pinned: chunks that stay on the device throughout. The caller subtracts other bytes that they keep there, such
            as optimizer states, from the budget.
        prefetch: most transfers started before their use. This changes neither the number of fetches nor the gaps that
            are kept.
    """
    needs = [moment.needs - pinned for moment in moments] if pinned else [moment.needs for moment in moments]
    runs = StepRuns.of(needs, [moment.other_bytes for moment in moments])
    always = sum(chunk_bytes[chunk] for chunk in pinned)
    room = runs.room(chunk_bytes, budget_bytes - always)
    planned = _plan_stays(runs.needs, chunk_bytes, room)
    if planned is None:
        run = room.index(min(room))
        tightest = (moment for moment in moments[runs.firsts[run] :] if moment.other_bytes == runs.most_bytes[run])
        return Shortfall(-min(room), next(tightest))
    stays, left = planned
    edges = [*runs.firsts, len(moments)]
    stays = [_Span(edges[stay.first], edges[stay.last + 1] - 1, stay.chunk) for stay in stays]
    by_moment = [
        free + most - moment.other_bytes
        for free, most, (first, end) in zip(left, runs.most_bytes, pairwise(edges), strict=True)
        for moment in moments[first:end]
    ]
    starts, by_moment = _starts(stays, chunk_bytes, by_moment, prefetch)
    return TransferSchedule(
        steps=_steps(stays, starts, len(moments)),
        fetched_bytes=sum(chunk_bytes[stay.chunk] for stay in stays),
        peak_bytes=budget_bytes - min(by_moment, default=budget_bytes - always),
    )


class StepRuns(NamedTuple):
    """Runs of consecutive moments that need the same chunks, as lists of equal length."""

    needs: Sequence[frozenset[int]]
    firsts: Sequence[int]  # first moment of each run
    most_bytes: Sequence[int]  # maximum of `other_bytes` in the run
    last_bytes: Sequence[int]  # `other_bytes` of its last moment

    @classmethod
    def of(cls, needs: Sequence[frozenset[int]], other_bytes: Sequence[int]) -> StepRuns:
        """The runs of moments with these needs and `other_bytes`."""
        firsts = [now for now, needed in enumerate(needs) if now == 0 or needed != needs[now - 1]]
        spans = list(pairwise([*firsts, len(needs)]))
        return cls(
            [needs[first] for first in firsts],
            firsts,
            [max(other_bytes[first:end]) for first, end in spans],
            [other_bytes[end - 1] for _, end in spans],
        )

    def room(self, chunk_bytes: Sequence[int], budget_bytes: int) -> list[int]:
        """The room in the budget at each run's tightest moment, with only its needs on the device."""
        return [
            budget_bytes - most - sum(chunk_bytes[chunk] for chunk in needed)
            for most, needed in zip(self.most_bytes, self.needs, strict=True)
        ]


def transfer_cost(
    runs: StepRuns, chunk_bytes: Sequence[int], budget_bytes: int, transfer_bytes: int, *, prefetch: int = 1
) -> int | None:
    """The cost of the schedule, as bytes that the link could move in the same time; None if nothing keeps the budget.

    It is the sum of the fetched bytes, again the bytes of fetches that nothing overlaps, and `transfer_bytes` per
    transfer. These are the bytes that the link moves in the time that a start takes. A fetch is waited for if it could
    not start one moment before its use. So the schedule itself is not needed.
    """
    planned = _plan_stays(runs.needs, chunk_bytes, runs.room(chunk_bytes, budget_bytes))
    if planned is None:
        return None
    stays, left = planned
    cost, first, spare = transfer_bytes * len(stays), -1, 0
    for index, stay in enumerate(stays):
        num_bytes, earliest = chunk_bytes[stay.chunk], stays[index - prefetch].first if index >= prefetch else 0
        if stay.first > max(first, 0):
            before = stay.first - 1
            spare = left[before] + runs.most_bytes[before] - runs.last_bytes[before]
        first = stay.first
        if earliest < first and num_bytes <= spare:
            spare -= num_bytes
            cost += num_bytes
        else:
            cost += 2 * num_bytes
    return cost


def _plan_stays(
    needs: Sequence[frozenset[int]], chunk_bytes: Sequence[int], room: Sequence[int]
) -> tuple[list[_Span], list[int]] | None:
    """(each chunk's stays without prefetching, the room that they leave); None if nothing keeps the budget."""
    if room and min(room) < 0:
        return None
    gaps = _gaps(needs)
    dropped, left = _restore_gaps(gaps, _dropped_gaps(gaps, chunk_bytes, room), chunk_bytes, room)
    return _stays(needs, dropped), left


class _Span(NamedTuple):
    """A chunk and two moments: the uses around a gap, or the first and last moment of a stay on the device."""

    first: int
    last: int
    chunk: int


def _gaps(needs: Sequence[frozenset[int]]) -> list[_Span]:
    """Gaps between consecutive uses of a chunk that have moments between them, in the order of their starts."""
    latest: dict[int, int] = {}
    gaps: list[_Span] = []
    for now, needed in enumerate(needs):
        for chunk in needed:
            if latest.get(chunk, now) < now - 1:
                gaps.append(_Span(latest[chunk], now, chunk))
            latest[chunk] = now
    return sorted(gaps)


def _dropped_gaps(gaps: Sequence[_Span], chunk_bytes: Sequence[int], room: Sequence[int]) -> list[_Span]:
    """The gaps that are not kept: at a moment with too little room, those that end last."""
    dropped: list[_Span] = []
    by_end: list[tuple[int, int]] = []  # gaps that have begun, the last to end on top
    ending = [0] * (len(room) + 1)  # bytes of kept gaps by the moment at which they end
    begun = held = 0
    for now, most in enumerate(room):
        held -= ending[now]
        while begun < len(gaps) and gaps[begun].first < now:
            gap = gaps[begun]
            heappush(by_end, (-gap.last, begun))
            held += chunk_bytes[gap.chunk]
            ending[gap.last] += chunk_bytes[gap.chunk]
            begun += 1
        while held > most:
            # The heap may have gaps that ended, but below all others. As bytes are held, the top has not ended.
            gap = gaps[heappop(by_end)[1]]
            dropped.append(gap)
            held -= chunk_bytes[gap.chunk]
            ending[gap.last] -= chunk_bytes[gap.chunk]
    return dropped


def _restore_gaps(
    gaps: Iterable[_Span], dropped: Iterable[_Span], chunk_bytes: Sequence[int], room: Sequence[int]
) -> tuple[frozenset[_Span], list[int]]:
    """(the dropped gaps that cannot be restored, the room left at each moment)."""
    missing = set(dropped)
    change = [0] * (len(room) + 1)
    for gap in gaps:
        if gap not in missing:
            change[gap.first + 1] -= chunk_bytes[gap.chunk]
            change[gap.last] += chunk_bytes[gap.chunk]
    left = np.array(room, dtype=np.int64) + np.array(change, dtype=np.int64).cumsum()[:-1]
    tight = 0  # where the last gap failed; most others fail there, too, since gaps of one pass are nested
    for gap in sorted(missing, key=lambda gap: (-chunk_bytes[gap.chunk], gap)):
        if gap.first < tight < gap.last and left[tight] < chunk_bytes[gap.chunk]:
            continue
        inside = left[gap.first + 1 : gap.last]
        tightest = int(inside.argmin())
        if inside[tightest] >= chunk_bytes[gap.chunk]:
            inside -= chunk_bytes[gap.chunk]
            missing.remove(gap)
        else:
            tight = gap.first + 1 + tightest
    return frozenset(missing), left.tolist()


def _stays(needs: Sequence[frozenset[int]], dropped: frozenset[_Span]) -> list[_Span]:
    """Each chunk's stays on the device without prefetching, in the order of their first moments."""
    refetched = {(gap.chunk, gap.last) for gap in dropped}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    stays: list[_Span] = []
    for now, needed in enumerate(needs):
        for chunk in needed:
            if (chunk, now) in refetched:
                stays.append(_Span(first[chunk], last[chunk], chunk))
                first[chunk] = now
            first.setdefault(chunk, now)
            last[chunk] = now
    stays += [_Span(first[chunk], last[chunk], chunk) for chunk in first]
    return sorted(stays)


def _starts(
    stays: Sequence[_Span], chunk_bytes: Sequence[int], room: Sequence[int], prefetch: int
) -> tuple[list[int], list[int]]:
    """(the moment at which each stay's fetch starts, the room left at each moment)."""
    left = list(room)
    starts = []
    for index, stay in enumerate(stays):
        earliest = stays[index - prefetch].first if index >= prefetch else 0
        start = stay.first
        while start > earliest and left[start - 1] >= chunk_bytes[stay.chunk]:
            start -= 1
            left[start] -= chunk_bytes[stay.chunk]
        starts.append(start)
    return starts, left


def _steps(stays: Sequence[_Span], starts: Sequence[int], num_moments: int) -> tuple[StepTransfers, ...]:
    evict, fetch, prefetch = (defaultdict[int, list[int]](list) for _ in range(3))
    for stay, start in zip(stays, starts, strict=True):
        (fetch if start == stay.first else prefetch)[start].append(stay.chunk)
        evict[stay.last + 1].append(stay.chunk)
    return tuple(
        StepTransfers(*(tuple(chunks[now]) for chunks in (evict, fetch, prefetch))) for now in range(num_moments)
    )


def choose_pinned(
    moments: Sequence[ScheduleStep],
    chunk_bytes: Sequence[int],
    state_bytes: Sequence[int],
    budget_bytes: int,
    *,
    is_shared: bool = False,
    fills_device: bool = False,
) -> frozenset[int]:
    """The chunks to pin on the device, with their optimizer states, such that the fewest bytes travel.

    A pinned chunk needs no fetches, and its gradient no copy to the host. But it takes several times its size at every
    moment, in which others could stay between uses. So chunks are ranked by saved bytes per taken byte, and the best
    ones are pinned. The traffic is nearly convex in their number, so bisection finds the minimum.

    Args:
        moments: of one training step, in order.
        chunk_bytes: of each chunk, by its index.
        state_bytes: of each chunk's gradient, master weights and optimizer states; 0 if it is frozen.
        budget_bytes: device memory for chunks and everything else.
        is_shared: processes share every chunk. Then only a share is pinned, which counts among the states, and the
            chunk is gathered like others.
        fills_device: pin as many as the budget has room for, since the host has none for them.
    """
    runs = StepRuns.of([moment.needs for moment in moments], [moment.other_bytes for moment in moments])

    def fetches(budget_bytes: int, pinned: frozenset[int] = frozenset()) -> list[int] | None:
        """The chunks to fetch, once per fetch; None if nothing keeps the budget."""
        fewer = StepRuns.of([needed - pinned for needed in runs.needs], runs.most_bytes)
        room = fewer.room(chunk_bytes, budget_bytes - sum(chunk_bytes[chunk] for chunk in pinned))
        planned = _plan_stays(fewer.needs, chunk_bytes, room)
        return None if planned is None else [stay.chunk for stay in planned[0]]

    plain = fetches(budget_bytes)
    if plain is None:
        return frozenset()
    saved = [size if state else 0 for size, state in zip(chunk_bytes, state_bytes, strict=True)]
    for chunk in plain:
        saved[chunk] += chunk_bytes[chunk]
    taken = [state if is_shared else size + state for size, state in zip(chunk_bytes, state_bytes, strict=True)]
    useful = (chunk for chunk in range(len(taken)) if saved[chunk] and taken[chunk])
    ranked = sorted(useful, key=lambda chunk: -saved[chunk] / taken[chunk])
    returned = sum(size for size, state in zip(chunk_bytes, state_bytes, strict=True) if state)

    def travels(count: int) -> float:
        pinned = frozenset(ranked[:count])
        room = budget_bytes - sum(state_bytes[chunk] for chunk in pinned)
        chunks = fetches(room, frozenset() if is_shared else pinned)
        if chunks is None:
            return inf
        fetched = sum(chunk_bytes[chunk] for chunk in chunks if chunk not in pinned)
        return fetched + returned - sum(chunk_bytes[chunk] for chunk in pinned if state_bytes[chunk])

    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        more = travels(middle + 1)
        if more < inf if fills_device else more < travels(middle):
            low = middle + 1
        else:
            high = middle
    return frozenset(ranked[:low])
