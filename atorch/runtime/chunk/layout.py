"""Which parameter lies in which chunk, and how large chunks are.

A chunk is what moves: a flat buffer of parameters that are used one after another (the chunks of PatrickStar, Fang et
al. 2021, arXiv 2108.05818). A chunk allocates what its parameters need and no more, so that its capacity is a bound and
not a waste; what is lost is the padding that makes it divide evenly among processes.

Small chunks follow a budget closely, as less is brought along that nobody asked for; large ones need fewer transfers,
each of which costs something beside its bytes. The capacity is searched for. What matters of a capacity is how many
chunks it makes, and of those that make equally many the smallest makes the most even ones: so the search goes through
counts of chunks, in steps of a tenth first and then one by one around the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Item(NamedTuple):
    """A parameter, tied ones once."""

    name: str
    numel: int
    dtype: str
    trainable: bool


class Slot(NamedTuple):
    """Where in its chunk a parameter lies, in elements."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class ChunkSpec:
    """A chunk: its parameters in order of their first use, all of one dtype, all of them trained or none."""

    index: int
    slots: tuple[Slot, ...]
    numel: int  # allocated: what the slots take, made up to a multiple of the shards
    dtype: str
    trainable: bool


@dataclass(frozen=True)
class Layout:
    """All chunks, in order of the first use of their first parameter."""

    chunks: tuple[ChunkSpec, ...]

    @property
    def utilisation(self) -> float:
        """The share of allocated elements that parameters take, 0 to 1."""
        allocated = sum(chunk.numel for chunk in self.chunks)
        return sum(slot.numel for chunk in self.chunks for slot in chunk.slots) / allocated if allocated else 1.0

    @cached_property
    def chunk_of(self) -> dict[str, int]:
        """The index of the chunk of each parameter, by its name."""
        return {slot.name: chunk.index for chunk in self.chunks for slot in chunk.slots}

    def chunks_of(self, names: Iterable[str]) -> frozenset[int]:
        """The chunks that have these parameters."""
        return frozenset(self.chunk_of[name] for name in names)


def pack(items: Sequence[Item], capacity: int, shards: int = 1) -> Layout:
    """Fills chunks of at most `capacity` elements with `items`, in their order.

    Each dtype has chunks of its own, and so have parameters that are not trained. A parameter larger than `capacity`
    has a chunk to itself, and those around it share theirs as if it were not there.

    Args:
        items: in order of their first use.
        capacity: in elements, not counting what makes a chunk a multiple of `shards`.
        shards: processes that keep an equal part of each chunk.
    """
    groups: list[list[Item]] = []
    filling: dict[tuple[str, bool], tuple[list[Item], int]] = {}  # by kind: the chunk being filled, elements in it
    for item in items:
        kind = (item.dtype, item.trainable)
        group, used = filling.get(kind, ([], capacity))
        if used + item.numel > capacity:
            group, used = [], 0
            groups.append(group)
        group.append(item)
        if item.numel <= capacity:
            filling[kind] = (group, used + item.numel)
    return Layout(tuple(_spec(index, group, shards) for index, group in enumerate(groups)))


def _spec(index: int, group: Sequence[Item], shards: int) -> ChunkSpec:
    slots: list[Slot] = []
    end = 0
    for item in group:
        slots.append(Slot(item.name, end, item.numel))
        end += item.numel
    return ChunkSpec(index, tuple(slots), -(-end // shards) * shards, group[0].dtype, group[0].trainable)


def search(items: Sequence[Item], evaluate: Callable[[Layout], float | None], *, shards: int = 1) -> Layout:
    """The layout that costs least, and of equals the one with the fewest chunks.

    Args:
        items: in order of their first use.
        evaluate: what a layout costs, or None where it does not fit: the bytes that its schedule fetches, say, and
            for each transfer as many bytes as a link moves in the time that it takes to begin one.
        shards: processes that keep an equal part of each chunk.

    Where nothing fits, every parameter has a chunk of its own, which falls short by less than any other layout.
    """
    if not items:
        return Layout(())
    largest = sum(item.numel for item in items)
    costs: dict[int, tuple[float, int, Layout]] = {}

    def consider(count: int) -> None:
        layout = pack(items, _least_capacity(items, count, largest), shards)
        chunks = len(layout.chunks)
        if chunks not in costs and (cost := evaluate(layout)) is not None:
            costs[chunks] = (cost, chunks, layout)

    counts = _coarse(len(items))
    for count in counts:
        consider(count)
    if not costs:
        return pack(items, 0, shards)
    best = min(costs.values(), key=lambda found: found[:2])[1]
    below = max((count for count in counts if count < best), default=best)
    above = min((count for count in counts if count > best), default=best)
    for count in range(below + 1, above):
        consider(count)
    return min(costs.values(), key=lambda found: found[:2])[2]


def _coarse(last: int) -> list[int]:
    """Counts from 1 to `last`, each a tenth above the one before where that is more than one."""
    counts = [1]
    while counts[-1] < last:
        counts.append(min(last, max(counts[-1] + 1, counts[-1] * 11 // 10)))
    return counts


def _least_capacity(items: Sequence[Item], count: int, largest: int) -> int:
    """The least capacity that makes at most `count` chunks, or `largest` where none does."""
    low, high = 0, largest
    while low < high:
        middle = (low + high) // 2
        if len(pack(items, middle).chunks) <= count:
            high = middle
        else:
            low = middle + 1
    return high
