"""The assignment of parameters to chunks, and the size of chunks.

A chunk is the unit of transfer: a flat buffer of parameters that are used one after another (PatrickStar, Fang et al.
2021, arXiv 2108.05818). A chunk allocates only what its parameters need, so its capacity is an upper bound. The only
waste is padding, which makes a chunk divide evenly among processes and aligns parameters to vectors.

Small chunks follow a budget closely, since a fetch brings fewer unneeded parameters. Large ones need fewer transfers,
each of which has a fixed cost. So the capacity is searched for. Of a capacity only the number of chunks matters, and of
capacities with the same number the smallest makes the most even chunks. So the search goes through numbers of chunks:
first in steps of a tenth, then in small steps around the best. Beyond thousands the first steps are of a half, since
the cost of an evaluation grows with the number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

MANY = 4096  # chunks


class Item(NamedTuple):
    """A parameter; tied ones appear once."""

    name: str
    numel: int
    dtype: str
    trainable: bool


class ChunkSlot(NamedTuple):
    """A parameter's place in its chunk, in elements."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class ChunkSpec:
    """A chunk: parameters in order of first use, of one dtype, all trainable or all frozen."""

    index: int
    slots: tuple[ChunkSlot, ...]
    numel: int  # allocated: the slots, padded to a multiple of the shards
    dtype: str
    trainable: bool

    def __str__(self) -> str:
        more = f" and {len(self.slots) - 1} more" if len(self.slots) > 1 else ""
        return f"chunk {self.index} ({self.slots[0].name}{more})" if self.slots else f"chunk {self.index}"


@dataclass(frozen=True)
class ChunkLayout:
    """All chunks, in order of their first use."""

    chunks: tuple[ChunkSpec, ...]

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """The index of each parameter's chunk, by name."""
        return {slot.name: chunk.index for chunk in self.chunks for slot in chunk.slots}

    @cached_property
    def slot_of(self) -> dict[str, ChunkSlot]:
        """The slot of each parameter, by name."""
        return {slot.name: slot for chunk in self.chunks for slot in chunk.slots}


def pack(items: Sequence[Item], capacity: int, shards: int = 1, aligned: int = 1) -> ChunkLayout:
    """Fill chunks of at most `capacity` elements with `items`, in order.

    Each dtype has separate chunks, and so have frozen parameters. A parameter larger than `capacity` has its own chunk,
    and its neighbours are packed as if it did not exist.

    Args:
        items: in order of their first use.
        capacity: in elements, without the padding to a multiple of `shards`.
        shards: number of processes that keep an equal share of each chunk.
        aligned: parameters begin at multiples of this number of elements.
    """
    return Packer(items, shards, aligned).layout(capacity)


@dataclass(frozen=True)
class ChunkAssignment:
    """The assignment of items to chunks, without `ChunkSpec`s."""

    chunk_of: np.ndarray[Any, Any]
    """The chunk of each item."""
    firsts: Sequence[int]
    """The first item of each chunk."""
    numels: Sequence[int]
    """The allocation of each chunk, in elements."""


class _Row(NamedTuple):
    """Items of one kind that share chunks, in order."""

    items: np.ndarray[Any, Any]
    begins: list[int]  # by item, elements of all items before it, with alignment
    ends: list[int]  # by item, its begin plus its own elements

    def starts(self, capacity: int, most: float = inf) -> list[int]:
        """The places in the row where chunks begin; only the first `most` + 1."""
        starts: list[int] = []
        start = 0
        while start < len(self.ends) and len(starts) <= most:
            starts.append(start)
            start = bisect_right(self.ends, capacity + self.begins[start], start)
        return starts


class Packer:
    """Packs the same items by one capacity after another; arguments as for `pack`."""

    def __init__(self, items: Sequence[Item], shards: int = 1, aligned: int = 1) -> None:
        self.items, self._shards, self._aligned = items, shards, aligned
        kinds: dict[tuple[str, bool], list[int]] = {}
        for index, item in enumerate(items):
            kinds.setdefault((item.dtype, item.trainable), []).append(index)
        self._kinds = [np.array(indices, dtype=np.int64) for indices in kinds.values()]
        self._numels = np.array([item.numel for item in items], dtype=np.int64)
        self._rooms = -(-self._numels // aligned) * aligned
        self._sorted = np.sort(self._numels)
        self._rows: tuple[int, list[_Row]] | None = None  # by the number of items that share chunks

    def layout(self, capacity: int) -> ChunkLayout:
        filling = self.fill(capacity)
        groups: list[list[int]] = [[] for _ in filling.firsts]
        for index, chunk in enumerate(filling.chunk_of.tolist()):
            groups[chunk].append(index)
        rooms, specs = self._rooms.tolist(), []
        for chunk, (group, numel) in enumerate(zip(groups, filling.numels, strict=True)):
            slots, begin = [], 0
            for index in group:
                slots.append(ChunkSlot(self.items[index].name, begin, self.items[index].numel))
                begin += rooms[index]
            first = self.items[group[0]]
            specs.append(ChunkSpec(chunk, tuple(slots), numel, first.dtype, first.trainable))
        return ChunkLayout(tuple(specs))

    def fill(self, capacity: int) -> ChunkAssignment:
        """The assignment of items to chunks of this capacity."""
        oversized = np.flatnonzero(self._numels > capacity)
        firsts, lengths, numels = [oversized], [np.ones_like(oversized)], [self._numels[oversized]]
        members = [oversized]  # items by chunk
        for row in self._sharing(capacity):
            starts = np.array(row.starts(capacity), dtype=np.int64)
            until = np.append(starts[1:], len(row.items))
            firsts.append(row.items[starts])
            lengths.append(until - starts)
            members.append(row.items)
            begins, ends = np.array(row.begins, dtype=np.int64), np.array(row.ends, dtype=np.int64)
            numels.append(ends[until - 1] - begins[starts])
        first, numel = np.concatenate(firsts), np.concatenate(numels)
        order = np.argsort(first)  # chunks in the order of their first items
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        chunk_of = np.empty(len(self.items), dtype=np.int64)
        # `members` lists items chunk by chunk, so each chunk's place is repeated for as many items as it has.
        chunk_of[np.concatenate(members)] = np.repeat(place, np.concatenate(lengths))
        allocated = -(-numel // self._shards) * self._shards
        return ChunkAssignment(chunk_of, first[order].tolist(), allocated[order].tolist())

    def least_capacity(self, count: int, most: int | None) -> int:
        """The least capacity that makes at most `count` chunks, to a thousandth; `most` if no smaller one does."""
        total = int(self._rooms.sum())
        low, high = 0, total if most is None else min(most, total)
        while high - low > high // 1000:
            middle = (low + high) // 2
            if self._makes_at_most(count, middle):
                high = middle
            else:
                low = middle + 1
        return high

    def _makes_at_most(self, count: int, capacity: int) -> bool:
        left = count - (len(self.items) - self._num_sharing(capacity))
        for row in self._sharing(capacity) if left >= 0 else ():
            if row.begins[-1] > left * (capacity + self._aligned):
                return False  # more elements than these chunks can hold
            left -= len(row.starts(capacity, left))
            if left < 0:
                break
        return left >= 0

    def _num_sharing(self, capacity: int) -> int:
        return int(np.searchsorted(self._sorted, capacity, side="right"))

    def _sharing(self, capacity: int) -> list[_Row]:
        """Items that are no larger than `capacity`, by kind."""
        num = self._num_sharing(capacity)
        if self._rows is None or self._rows[0] != num:
            rows = []
            for kind in self._kinds:
                items = kind[self._numels[kind] <= capacity]
                begins = np.append(0, self._rooms[items].cumsum())[:-1]
                if len(items):
                    rows.append(_Row(items, begins.tolist(), (begins + self._numels[items]).tolist()))
            self._rows = num, rows
        return self._rows[1]


def search(
    items: Sequence[Item],
    evaluate: Callable[[ChunkAssignment], float | None],
    *,
    least: Callable[[ChunkAssignment], float] = lambda _: -inf,
    shards: int = 1,
    aligned: int = 1,
    most: int | None = None,
) -> ChunkLayout:
    """The cheapest layout, with the fewest chunks among equals.

    If nothing fits, every parameter has its own chunk, which exceeds the budget by less than any other layout.

    Args:
        items: in order of their first use.
        evaluate: the cost of a layout, such as `transfer_cost`, or None if it does not fit.
        least: a lower bound of the cost, quick to compute; a layout with too high a bound is not evaluated.
        shards: number of processes that keep an equal share of each chunk.
        aligned: parameters begin at multiples of this number of elements.
        most: the largest capacity to consider, in elements; None: all parameters together.
    """
    evaluated: dict[int, tuple[float, int, int]] = {}  # by number of chunks: cost, number, capacity
    packer = Packer(items, shards, aligned)

    def consider(count: int) -> None:
        capacity = packer.least_capacity(count, most)
        filling = packer.fill(capacity)
        chunks = len(filling.firsts)
        if chunks in evaluated or (evaluated and least(filling) > min(evaluated.values())[0]):
            return
        if (cost := evaluate(filling)) is not None:
            evaluated[chunks] = (cost, chunks, capacity)

    counts = _coarse_counts(len(items))
    for count in counts:
        consider(count)
    if not evaluated:
        return packer.layout(0)
    best = min(evaluated.values())[1]
    below = max((count for count in counts if count < best), default=best)
    above = min((count for count in counts if count > best), default=best)
    for count in range(below + 1, above, 1 + (above - below) // (32 if best <= MANY else 8)):
        consider(count)
    return packer.layout(min(evaluated.values())[2])


def _coarse_counts(last: int) -> list[int]:
    """Counts from 1 to `last`, each a tenth (from MANY on a half), and at least one, above the one before."""
    counts = [1]
    while counts[-1] < last:
        now = counts[-1]
        counts.append(min(last, max(now + 1, now * 11 // 10 if now < MANY else now * 3 // 2)))
    return counts
