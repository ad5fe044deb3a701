"""Turns the moments of a step into evictions, fetches and prefetches, under a budget of bytes.

Parameters are read and never written while a step computes, so a chunk on the device may be dropped at no cost, and
fetching it again costs its bytes. Between two uses of a chunk is a *gap*: kept, it takes the chunk's bytes of room at
every moment inside it and saves one fetch. Going through the moments in order, whenever kept gaps take more room than
there is, those go that end last (Belady 1966, *A study of replacement algorithms for a virtual-storage computer*). That
fetches least where chunks are equally large, even while the room changes from moment to moment, since then it is the
choice of the most intervals under a capacity. Where they are not, dropping a large chunk may free more than was asked:
a second pass takes back what still fits.

A chunk whose gap is not kept leaves the device right after the use before it, which is what makes room to bring others
in early. The third pass does: each fetch starts as early as its bytes fit until they are used.

Moments that need the same chunks one after another are one *run*: no gap begins or ends inside of it, so the first two
passes go through runs. Where chunks hold many parameters there are far fewer of them than moments.
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
    """A point of a step from which on an operation runs."""

    name: str  # the operation and its phase, for people
    needs: frozenset[int]  # chunks that must be on the device
    other_bytes: int  # the most that everything but chunks takes on the device, from here to the next moment


@dataclass(frozen=True)
class StepTransfers:
    """Actions at a moment before its operation runs, in this order."""

    evict: tuple[int, ...] = ()  # chunks that leave the device
    fetch: tuple[int, ...] = ()  # needed now and not on the device: waited for
    prefetch: tuple[int, ...] = ()  # needed later: started, in the order in which they are needed


@dataclass(frozen=True)
class TransferSchedule:
    """A step of each moment, and what they come to."""

    steps: tuple[StepTransfers, ...]
    fetched_bytes: int
    peak_bytes: int  # the most on the device at once, everything counted
    resident_at_end: frozenset[int]

    @property
    def num_fetches(self) -> int:
        """The number of transfers, early ones and others."""
        return sum(len(step.fetch) + len(step.prefetch) for step in self.steps)

    def cost(self, chunk_bytes: Sequence[int], transfer_bytes: int) -> int:
        """Bytes that the link could have moved in the time that this one takes of it.

        These are the bytes fetched, those of them once more that are waited for from the first on, as nothing runs
        meanwhile, and `transfer_bytes` for each transfer: what the link moves in the time that it takes to begin one.
        """
        waited = sum(chunk_bytes[chunk] for step in self.steps for chunk in step.fetch)
        return self.fetched_bytes + waited + transfer_bytes * self.num_fetches


@dataclass(frozen=True)
class Shortfall:
    """No schedule keeps the budget: the moment that misses most bytes, though only what it needs is on the device."""

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
    """The steps by which every chunk is on the device when it is needed, and the device within its budget.

    The device begins with `pinned` alone on it.

    Args:
        moments: of one step of training, in order.
        chunk_bytes: of each chunk, by its index.
        budget_bytes: of the device, for chunks and everything else.
        pinned: chunks that stay on the device from before the first moment to after the last. What they keep there
            beside themselves, such as optimizer states, is to be taken off the budget.
        prefetch: how many transfers may have been started that are not needed yet. Which ones are started early
            changes neither what is fetched nor what stays.
    """
    needs = [moment.needs - pinned for moment in moments] if pinned else [moment.needs for moment in moments]
    runs = StepRuns.of(needs, [moment.other_bytes for moment in moments])
    always = sum(chunk_bytes[chunk] for chunk in pinned)
    room = runs.room(chunk_bytes, budget_bytes - always)
    if room and min(room) < 0:
        return Shortfall(-min(room), _tightest(runs, room, moments))
    stays, left = _kept(runs.needs, chunk_bytes, room)
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
        resident_at_end=pinned.union(stay.chunk for stay in stays if stay.last == len(moments) - 1),
    )


class StepRuns(NamedTuple):
    """Moments that need the same chunks one after another, as one each; all lists are as long."""

    needs: Sequence[frozenset[int]]
    firsts: Sequence[int]  # its first moment
    most_bytes: Sequence[int]  # the most of what else is on the device, of all its moments
    last_bytes: Sequence[int]  # the same of its last moment

    @classmethod
    def of(cls, needs: Sequence[frozenset[int]], other_bytes: Sequence[int]) -> StepRuns:
        """The runs of moments that need these chunks, beside so much else each."""
        firsts = [now for now, needed in enumerate(needs) if now == 0 or needed != needs[now - 1]]
        spans = list(pairwise([*firsts, len(needs)]))
        return cls(
            [needs[first] for first in firsts],
            firsts,
            [max(other_bytes[first:end]) for first, end in spans],
            [other_bytes[end - 1] for _, end in spans],
        )

    def room(self, chunk_bytes: Sequence[int], budget_bytes: int) -> list[int]:
        """The room that each run leaves of the budget at its tightest moment, with its needs alone on the device."""
        return [
            budget_bytes - most - sum(chunk_bytes[chunk] for chunk in needed)
            for most, needed in zip(self.most_bytes, self.needs, strict=True)
        ]


def transfer_cost(
    runs: StepRuns, chunk_bytes: Sequence[int], budget_bytes: int, transfer_bytes: int, *, prefetch: int = 1
) -> int | None:
    """`TransferSchedule.cost` of the schedule that there would be; None where nothing keeps the budget.

    A fetch is waited for where it could not start one moment before its use. So much is known without its start.
    """
    room = runs.room(chunk_bytes, budget_bytes)
    if room and min(room) < 0:
        return None
    stays, left = _kept(runs.needs, chunk_bytes, room)
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


def _fetched(
    moments: Sequence[ScheduleStep],
    chunk_bytes: Sequence[int],
    budget_bytes: int,
    pinned: frozenset[int] = frozenset(),
) -> list[int] | None:
    """The chunks that `schedule` would fetch, each as often as it would; None where nothing keeps the budget."""
    runs = StepRuns.of([moment.needs - pinned for moment in moments], [moment.other_bytes for moment in moments])
    room = runs.room(chunk_bytes, budget_bytes - sum(chunk_bytes[chunk] for chunk in pinned))
    if room and min(room) < 0:
        return None
    return [stay.chunk for stay in _kept(runs.needs, chunk_bytes, room)[0]]


def _tightest(runs: StepRuns, room: Sequence[int], moments: Sequence[ScheduleStep]) -> ScheduleStep:
    """The first moment that has least room."""
    run = room.index(min(room))
    return next(each for each in moments[runs.firsts[run] :] if each.other_bytes == runs.most_bytes[run])


def _kept(
    needs: Sequence[frozenset[int]], chunk_bytes: Sequence[int], room: Sequence[int]
) -> tuple[list[_Span], list[int]]:
    """(each chunk's stays without prefetching, what room they leave)."""
    gaps = _gaps(needs)
    dropped, left = _restored(gaps, _dropped(gaps, chunk_bytes, room), chunk_bytes, room)
    return _stays(needs, dropped), left


class _Span(NamedTuple):
    """A chunk and two moments: the uses around a gap, or the first and the last moment of a stay on the device."""

    first: int
    last: int
    chunk: int


def _gaps(needs: Sequence[frozenset[int]]) -> list[_Span]:
    """Gaps from each use of a chunk to its next one, where there are moments between; in the order of their starts."""
    latest: dict[int, int] = {}
    gaps: list[_Span] = []
    for now, needed in enumerate(needs):
        for chunk in needed:
            if latest.get(chunk, now) < now - 1:
                gaps.append(_Span(latest[chunk], now, chunk))
            latest[chunk] = now
    return sorted(gaps)


def _dropped(gaps: Sequence[_Span], chunk_bytes: Sequence[int], room: Sequence[int]) -> list[_Span]:
    """The gaps that are not kept: of those that share a moment with too little room, the last to end."""
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
            # What has ended lies below what has not, and something that is held has not.
            gap = gaps[heappop(by_end)[1]]
            dropped.append(gap)
            held -= chunk_bytes[gap.chunk]
            ending[gap.last] -= chunk_bytes[gap.chunk]
    return dropped


def _restored(
    gaps: Iterable[_Span], dropped: Iterable[_Span], chunk_bytes: Sequence[int], room: Sequence[int]
) -> tuple[frozenset[_Span], list[int]]:
    """(the gaps that cannot be kept beside all others, the room that is left at each moment)."""
    missing = set(dropped)
    change = [0] * (len(room) + 1)
    for gap in gaps:
        if gap not in missing:
            change[gap.first + 1] -= chunk_bytes[gap.chunk]
            change[gap.last] += chunk_bytes[gap.chunk]
    left = np.array(room, dtype=np.int64) + np.array(change, dtype=np.int64).cumsum()[:-1]
    tight = 0  # where the last one failed. Most others fail there, too: gaps of one pass lie within each other
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
    """(the moment at which each stay's fetch starts, what room is left at each moment)."""
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
    """The stays as what is done at each moment."""
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
) -> frozenset[int]:
    """The chunks that had best live on the device for good, with all that their optimizer needs: fewest bytes travel.

    A pinned chunk needs nothing of the host, and its gradient no way back, but takes several times its size at every
    moment, where others could have stayed between uses. So chunks are ranked by what they save for each byte that they
    take, and the best so many are pinned: what travels is nearly convex in their number, and its least is found by
    bisection.

    Args:
        moments: of one step of training, in order.
        chunk_bytes: of each chunk, by its index.
        state_bytes: of the gradient, master weights and optimizer states of each chunk; 0: it is not trained.
        budget_bytes: of the device, for chunks and everything else.
        is_shared: processes share every chunk. What lives on the device is then a share, which counts among the states,
            and the chunk is gathered as others are.
    """
    runs = StepRuns.of([moment.needs for moment in moments], [moment.other_bytes for moment in moments])
    moments = [ScheduleStep("", needed, most) for needed, most in zip(runs.needs, runs.most_bytes, strict=True)]
    plain = _fetched(moments, chunk_bytes, budget_bytes)
    if plain is None:
        return frozenset()
    saved = [size if state else 0 for size, state in zip(chunk_bytes, state_bytes, strict=True)]
    for chunk in plain:
        saved[chunk] += chunk_bytes[chunk]
    taken = [state if is_shared else size + state for size, state in zip(chunk_bytes, state_bytes, strict=True)]
    ranked = sorted(
        (each for each in range(len(taken)) if saved[each] and taken[each]), key=lambda each: -saved[each] / taken[each]
    )
    returned = sum(size for size, state in zip(chunk_bytes, state_bytes, strict=True) if state)

    def travels(count: int) -> float:
        pinned = frozenset(ranked[:count])
        room = budget_bytes - sum(state_bytes[chunk] for chunk in pinned)
        found = _fetched(moments, chunk_bytes, room, pinned=frozenset() if is_shared else pinned)
        if found is None:
            return inf
        fetched = sum(chunk_bytes[chunk] for chunk in found if chunk not in pinned)
        return fetched + returned - sum(chunk_bytes[chunk] for chunk in pinned if state_bytes[chunk])

    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high) // 2
        if travels(middle + 1) < travels(middle):
            low = middle + 1
        else:
            high = middle
    return frozenset(ranked[:low])
