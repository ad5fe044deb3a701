"""The assignment of parameters to chunks, and the size of chunks.

A chunk is what moves: a flat buffer of parameters that are used one after another (the chunks of PatrickStar, Fang et
al. 2021, arXiv 2108.05818). A chunk allocates what its parameters need and no more, so that its capacity is a bound and
not a waste; what is lost is the padding that makes it divide evenly among processes and lets parameters begin where a
vector does.

Small chunks follow a budget closely, as less is brought along that nobody asked for; large ones need fewer transfers,
each of which costs something beside its bytes. The capacity is searched for. What matters of a capacity is how many
chunks it makes, and of those that make equally many the smallest makes the most even ones: so the search goes through
counts of chunks, in steps of a tenth first and then in small ones around the best; of half beyond thousands, where
what a step costs grows with the count.
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
    """A parameter, tied ones once."""

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
    """A chunk: its parameters in order of their first use, all of one dtype, all of them trained or none."""

    index: int
    slots: tuple[ChunkSlot, ...]
    numel: int  # allocated: what the slots take, made up to a multiple of the shards
    dtype: str
    trainable: bool

    def __str__(self) -> str:
        more = f" and {len(self.slots) - 1} more" if len(self.slots) > 1 else ""
        return f"chunk {self.index} ({self.slots[0].name}{more})" if self.slots else f"chunk {self.index}"


@dataclass(frozen=True)
class ChunkLayout:
    """All chunks, in order of the first use of their first parameter."""

    chunks: tuple[ChunkSpec, ...]

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """The index of the chunk of each parameter, by its name."""
        return {slot.name: chunk.index for chunk in self.chunks for slot in chunk.slots}


def pack(items: Sequence[Item], capacity: int, shards: int = 1, aligned: int = 1) -> ChunkLayout:
    """Fills chunks of at most `capacity` elements with `items`, in their order.

    Each dtype has chunks of its own, and so have parameters that are not trained. A parameter larger than `capacity`
    has a chunk to itself, and those around it share theirs as if it were not there.

    Args:
        items: in order of their first use.
        capacity: in elements, not counting what makes a chunk a multiple of `shards`.
        shards: processes that keep an equal part of each chunk.
        aligned: a parameter begins at a multiple of so many elements.
    """
    return Packer(items, shards, aligned).layout(capacity)


@dataclass(frozen=True)
class Filling:
    """The chunk of each item, without the chunks."""

    chunk_of: np.ndarray[Any, Any]
    """The chunk of each item."""
    firsts: Sequence[int]
    """The first item of each chunk."""
    numels: Sequence[int]
    """The allocation of each chunk, in elements."""


class _Row(NamedTuple):
    """Items of one kind that share chunks, in order."""

    items: np.ndarray[Any, Any]
    begins: list[int]  # elements of all before it, with what aligns them
    ends: list[int]  # the same with its own

    def starts(self, capacity: int, most: float = inf) -> list[int]:
        """The places in the row where chunks begin; `most` + 1 of them are enough."""
        found: list[int] = []
        start = 0
        while start < len(self.ends) and len(found) <= most:
            found.append(start)
            start = bisect_right(self.ends, capacity + self.begins[start], start)
        return found


class Packer:
    """Fills chunks with the same items, by one capacity after the other; arguments as `pack` has them."""

    def __init__(self, items: Sequence[Item], shards: int = 1, aligned: int = 1) -> None:
        self.items, self._shards, self._aligned = items, shards, aligned
        kinds: dict[tuple[str, bool], list[int]] = {}
        for index, item in enumerate(items):
            kinds.setdefault((item.dtype, item.trainable), []).append(index)
        self._kinds = [np.array(each, dtype=np.int64) for each in kinds.values()]
        self._numels = np.array([item.numel for item in items], dtype=np.int64)
        self._rooms = -(-self._numels // aligned) * aligned
        self._sorted = np.sort(self._numels)
        self._rows: tuple[int, list[_Row]] | None = None  # by how many items share chunks

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

    def fill(self, capacity: int) -> Filling:
        """The same without the chunks themselves."""
        alone = np.flatnonzero(self._numels > capacity)
        firsts, lengths, numels = [alone], [np.ones_like(alone)], [self._numels[alone]]
        members = [alone]  # items by chunk
        for row in self._sharing(capacity):
            starts = np.array(row.starts(capacity), dtype=np.int64)
            until = np.append(starts[1:], len(row.items))
            firsts.append(row.items[starts])
            lengths.append(until - starts)
            members.append(row.items)
            begins, ends = np.array(row.begins, dtype=np.int64), np.array(row.ends, dtype=np.int64)
            numels.append(ends[until - 1] - begins[starts])
        first, numel = np.concatenate(firsts), np.concatenate(numels)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        chunk_of = np.empty(len(self.items), dtype=np.int64)
        chunk_of[np.concatenate(members)] = np.repeat(place, np.concatenate(lengths))
        allocated = -(-numel // self._shards) * self._shards
        return Filling(chunk_of, first[order].tolist(), allocated[order].tolist())

    def least_capacity(self, count: int, most: int | None) -> int:
        """The least capacity that makes at most `count` chunks, to a thousandth, or `most` where none below it does."""
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
                return False  # they would have to be fuller than full
            left -= len(row.starts(capacity, left))
            if left < 0:
                break
        return left >= 0

    def _num_sharing(self, capacity: int) -> int:
        return int(np.searchsorted(self._sorted, capacity, side="right"))

    def _sharing(self, capacity: int) -> list[_Row]:
        """Items by kind that are no larger than `capacity`."""
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
    evaluate: Callable[[Filling], float | None],
    *,
    least: Callable[[Filling], float] = lambda _: -inf,
    shards: int = 1,
    aligned: int = 1,
    most: int | None = None,
) -> ChunkLayout:
    """The layout that costs least, and of equals the one with the fewest chunks.

    Where nothing fits, every parameter has a chunk of its own, which falls short by less than any other layout.

    Args:
        items: in order of their first use.
        evaluate: what a layout costs, such as `Schedule.cost`, or None where it does not fit.
        least: what it costs at least, sooner told; a layout for which that is too much is not evaluated.
        shards: processes that keep an equal part of each chunk.
        aligned: a parameter begins at a multiple of so many elements.
        most: the largest capacity to consider, in elements; None: of all parameters together.
    """
    found: dict[int, tuple[float, int, int]] = {}  # by the number of chunks: cost, the number, capacity
    packer = Packer(items, shards, aligned)

    def consider(count: int) -> None:
        capacity = packer.least_capacity(count, most)
        filling = packer.fill(capacity)
        chunks = len(filling.firsts)
        if chunks in found or (found and least(filling) > min(found.values())[0]):
            return
        if (cost := evaluate(filling)) is not None:
            found[chunks] = (cost, chunks, capacity)

    counts = _coarse(len(items))
    for count in counts:
        consider(count)
    if not found:
        return packer.layout(0)
    best = min(found.values())[1]
    below = max((count for count in counts if count < best), default=best)
    above = min((count for count in counts if count > best), default=best)
    for count in range(below + 1, above, 1 + (above - below) // (32 if best <= MANY else 8)):
        consider(count)
    return packer.layout(min(found.values())[2])


def _coarse(last: int) -> list[int]:
    """Counts from 1 to `last`, each a tenth above the one before where that is more than one; of many, a half."""
    counts = [1]
    while counts[-1] < last:
        now = counts[-1]
        counts.append(min(last, max(now + 1, now * 11 // 10 if now < MANY else now * 3 // 2)))
    return counts
