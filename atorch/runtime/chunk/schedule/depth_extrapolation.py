"""The pass of a model with many similar blocks, extrapolated from passes of the same model with fewer blocks.

Each additional period of blocks adds a stretch of events to forward and to backward. It equals the adjacent stretch
with other names, and the bytes at each instant grow linearly. So two depths give the growth, and a third confirms it.
The maximum over an operation's instants is taken last, since the instant of the maximum moves with depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from atorch.runtime.chunk.schedule.pass_schedule import Access, AccessTrace

WARM, ENDS = 2, 2
"""Periods of the first and of the last blocks, which may differ from those between."""
FEWEST = WARM + 1 + ENDS
"""Periods of the shallowest usable model."""

Rename = Callable[[str, int], str]
_Numbers = np.ndarray[Any, Any]
_Origin = tuple[int, int]


class Event(NamedTuple):
    """An operation, or the arrival of a gradient."""

    operation: str | None
    """None for a gradient."""
    names: frozenset[str]
    num_bytes: _Numbers
    """Bytes except parameters, at each instant from this operation to the next one; empty for a gradient."""


def events_of(found: AccessTrace, instants: Sequence[Sequence[int]]) -> list[Event]:
    """A pass as events, in order.

    Args:
        found: the pass.
        instants: for each operation, the bytes except parameters at each instant until the next one.
    """
    none = np.empty(0, dtype=np.int64)
    events: list[Event] = []
    coming = list(reversed(found.gradients))
    for index in range(len(found.accesses) + 1):
        while coming and coming[-1][0] == index:
            events.append(Event(None, frozenset((coming.pop()[1],)), none))
        if index < len(found.accesses):
            operation, names, _ = found.accesses[index]
            events.append(Event(operation, names, np.array(instants[index], dtype=np.int64)))
    return events


def deeper(passes: Sequence[Sequence[Event]], rename: Rename, periods: int) -> AccessTrace | None:
    """The pass of a model with `periods` more periods than the first of three; None if it does not follow from them.

    Args:
        passes: of three models, each with one period of blocks more than the one before.
        rename: maps a parameter's name to that of its counterpart so many periods later. Names outside the repeated
            blocks map to themselves.
        periods: additional periods, compared with the first model.
    """
    first, second, third = passes
    for parts in _possible_parts(first, second, rename):
        if all(parts.make(first, events, more, rename) for more, events in ((1, second), (2, third))):
            growth = _growth(parts, first, second, third)
            return None if growth is None else _assembled(parts, first, growth, rename, periods)
    return None


class _Parts(NamedTuple):
    """The extension of the first pass to a deeper model, by stretches of events inserted at two places."""

    forward_at: int
    forward: int
    """Number of events of the forward stretch, a copy of those right before `forward_at`."""
    backward_at: int
    backward: int
    """Number of events of the backward stretch, a copy of those right after `backward_at`."""

    def origins(self, length: int, more: int) -> Iterator[_Origin]:
        """The origin of each event of a pass with `more` more periods: its place in the first pass, and periods later.

        length: of the first pass.
        """
        for place in range(self.forward_at):
            yield place, 0
        for later in range(1, more + 1):
            for place in range(self.forward_at - self.forward, self.forward_at):
                yield place, later
        for place in range(self.forward_at, self.backward_at):
            yield place, more
        for later in range(more, 0, -1):
            for place in range(self.backward_at, self.backward_at + self.backward):
                yield place, later
        for place in range(self.backward_at, length):
            yield place, 0

    def make(self, first: Sequence[Event], other: Sequence[Event], more: int, rename: Rename) -> bool:
        """True if `other` is the first pass with `more` more periods, except for bytes."""
        if len(other) != len(first) + more * (self.forward + self.backward):
            return False
        origins = self.origins(len(first), more)
        return all(
            event.operation == first[place].operation and event.names == _renamed(first[place].names, later, rename)
            for event, (place, later) in zip(other, origins, strict=True)
        )


def _possible_parts(first: Sequence[Event], second: Sequence[Event], rename: Rename) -> Iterator[_Parts]:
    """The possible cuts of the first pass, with the last `ENDS` periods between the two places."""
    added = len(second) - len(first)
    begin = _num_equal(first, second)
    end = min(_num_equal(first[::-1], second[::-1]), len(first) - begin)
    if added <= 0 or begin + end == 0:
        return
    after = first[begin] if begin + end < len(first) else None
    for forward in range(added + 1):
        backward = added - forward
        forward_at, backward_at = begin - ENDS * forward, len(first) - end + ENDS * backward
        if forward_at < forward or backward_at + backward > len(first):
            continue
        if after is None or second[begin + forward].names == _renamed(after.names, 1, rename):
            yield _Parts(forward_at, forward, backward_at, backward)


def _num_equal(one: Sequence[Event], other: Sequence[Event]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a[:2] != b[:2]), min(len(one), len(other)))


def _renamed(names: frozenset[str], later: int, rename: Rename) -> frozenset[str]:
    return frozenset([rename(name, later) for name in names]) if later else names


def _growth(
    parts: _Parts, first: Sequence[Event], second: Sequence[Event], third: Sequence[Event]
) -> dict[int, tuple[_Numbers, _Numbers]] | None:
    """The growth of each event's bytes per additional period of the model, and per period that the event is later.

    None if they do not grow linearly.
    """
    passes = [
        {origin: event.num_bytes for origin, event in zip(parts.origins(len(first), more), events, strict=True)}
        for more, events in enumerate((first, second, third))
    ]
    growth: dict[int, tuple[_Numbers, _Numbers]] = {}
    for place, event in enumerate(first):
        is_between = parts.forward_at <= place < parts.backward_at  # later by all added periods
        at_depths = [by_origin[place, more if is_between else 0] for more, by_origin in enumerate(passes)]
        if {len(num_bytes) for num_bytes in at_depths} != {len(event.num_bytes)}:
            return None
        growth[place] = at_depths[1] - at_depths[0], np.zeros_like(event.num_bytes)
        if (place, 1) in passes[1] and not is_between:
            if len(passes[1][place, 1]) != len(event.num_bytes):
                return None
            growth[place] = growth[place][0], passes[1][place, 1] - at_depths[1]
    for (place, later), num_bytes in passes[2].items():
        by_more, by_later = growth[place]
        if not np.array_equal(num_bytes, first[place].num_bytes + 2 * by_more + later * by_later):
            return None
    return growth


def _assembled(
    parts: _Parts,
    first: Sequence[Event],
    growth: dict[int, tuple[_Numbers, _Numbers]],
    rename: Rename,
    periods: int,
) -> AccessTrace:
    laters = np.arange(periods + 1, dtype=np.int64)[:, None]
    most: list[list[int]] = []
    for place, event in enumerate(first):
        by_more, by_later = growth[place]
        now = event.num_bytes + periods * by_more
        rows = (now + laters * by_later) if by_later.any() else now[None]
        most.append(rows.max(axis=1).tolist() if event.operation is not None else [])
    accesses: list[Access] = []
    gradients: list[tuple[int, str]] = []
    for place, later in parts.origins(len(first), periods):
        operation, names = first[place].operation, _renamed(first[place].names, later, rename)
        if operation is None:
            gradients += [(len(accesses), name) for name in names]
        else:
            accesses.append(Access(operation, names, most[place][min(later, len(most[place]) - 1)]))
    return AccessTrace(accesses, gradients)
