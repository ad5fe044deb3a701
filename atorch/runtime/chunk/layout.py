"""Which parameter lies in which chunk, and how large chunks are.

A chunk is what moves: a flat buffer of parameters that are used one after another (the chunks of PatrickStar, Fang et
al. 2021, arXiv 2108.05818). A chunk allocates what its parameters need and no more, so that its capacity is a bound and
not a waste; what is lost is the padding that makes it divide evenly among processes and lets parameters begin where a
vector does.

Small chunks follow a budget closely, as less is brought along that nobody asked for; large ones need fewer transfers,
each of which costs something beside its bytes. The capacity is searched for. What matters of a capacity is how many
chunks it makes, and of those that make equally many the smallest makes the most even ones: so the search goes through
counts of chunks, in steps of a tenth first and then in small ones around the best.
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

    def __str__(self) -> str:
        more = f" and {len(self.slots) - 1} more" if len(self.slots) > 1 else ""
        return f"chunk {self.index} ({self.slots[0].name}{more})" if self.slots else f"chunk {self.index}"


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


def pack(items: Sequence[Item], capacity: int, shards: int = 1, aligned: int = 1) -> Layout:
    """Fills chunks of at most `capacity` elements with `items`, in their order.

    Each dtype has chunks of its own, and so have parameters that are not trained. A parameter larger than `capacity`
    has a chunk to itself, and those around it share theirs as if it were not there.

    Args:
        items: in order of their first use.
        capacity: in elements, not counting what makes a chunk a multiple of `shards`.
        shards: processes that keep an equal part of each chunk.
        aligned: a parameter begins at a multiple of so many elements.
    """
    groups = _groups(items, capacity, aligned)
    return Layout(tuple(_spec(index, group, shards, aligned) for index, group in enumerate(groups)))


def _room(item: Item, aligned: int) -> int:
    return -(-item.numel // aligned) * aligned


def _groups(items: Iterable[Item], capacity: int, aligned: int) -> list[list[Item]]:
    """The items of each chunk."""
    groups: list[list[Item]] = []
    filling: dict[tuple[str, bool], tuple[list[Item], int]] = {}  # by kind: the chunk being filled, elements in it
    for item in items:
        kind = (item.dtype, item.trainable)
        group, used = filling.get(kind, ([], capacity))
        if used + item.numel > capacity or not group:
            group, used = [], 0
            groups.append(group)
        group.append(item)
        if item.numel <= capacity:
            filling[kind] = (group, used + _room(item, aligned))
    return groups


def _spec(index: int, group: Sequence[Item], shards: int, aligned: int) -> ChunkSpec:
    slots: list[Slot] = []
    begin = end = 0
    for item in group:
        slots.append(Slot(item.name, begin, item.numel))
        end = begin + item.numel
        begin += _room(item, aligned)
    return ChunkSpec(index, tuple(slots), -(-end // shards) * shards, group[0].dtype, group[0].trainable)


def search(
    items: Sequence[Item],
    evaluate: Callable[[Layout], float | None],
    *,
    shards: int = 1,
    aligned: int = 1,
    most: int | None = None,
) -> Layout:
    """The layout that costs least, and of equals the one with the fewest chunks.

    Where nothing fits, every parameter has a chunk of its own, which falls short by less than any other layout.

    Args:
        items: in order of their first use.
        evaluate: what a layout costs, such as `Schedule.cost`, or None where it does not fit.
        shards: processes that keep an equal part of each chunk.
        aligned: a parameter begins at a multiple of so many elements.
        most: the largest capacity to consider, in elements; None: of all parameters together.
    """
    found: dict[int, tuple[float, int, Layout]] = {}  # by the number of chunks

    def consider(count: int) -> None:
        layout = pack(items, _least_capacity(items, count, most, aligned), shards, aligned)
        chunks = len(layout.chunks)
        if chunks not in found and (cost := evaluate(layout)) is not None:
            found[chunks] = (cost, chunks, layout)

    counts = _coarse(len(items))
    for count in counts:
        consider(count)
    if not found:
        return pack(items, 0, shards, aligned)
    best = min(found.values())[1]
    below = max((count for count in counts if count < best), default=best)
    above = min((count for count in counts if count > best), default=best)
    for count in range(below + 1, above, 1 + (above - below) // 32):
        consider(count)
    return min(found.values())[2]


def _coarse(last: int) -> list[int]:
    """Counts from 1 to `last`, each a tenth above the one before where that is more than one."""
    counts = [1]
    while counts[-1] < last:
        counts.append(min(last, max(counts[-1] + 1, counts[-1] * 11 // 10)))
    return counts


def _least_capacity(items: Sequence[Item], count: int, most: int | None, aligned: int) -> int:
    """The least capacity that makes at most `count` chunks, to a thousandth, or `most` where none below it does."""
    total = sum(_room(item, aligned) for item in items)
    low, high = 0, total if most is None else min(most, total)
    while high - low > high // 1000:
        middle = (low + high) // 2
        if len(_groups(items, middle, aligned)) <= count:
            high = middle
        else:
            low = middle + 1
    return high
