"""Layouts: everything is in one place, chunks are filled in order, and the search finds what costs least."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch.runtime.chunk.layout import ChunkAssignment, ChunkLayout, ChunkSlot, Item, Packer, pack, search

KINDS = st.sampled_from([("float32", True), ("float32", False), ("bfloat16", True)])
ITEMS = st.lists(st.tuples(st.integers(0, 9), KINDS), max_size=12).map(
    lambda drawn: [Item(f"p{index}", numel, *kind) for index, (numel, kind) in enumerate(drawn)]
)


def trained(*sizes: int) -> list[Item]:
    return [Item(f"p{index}", size, "float32", True) for index, size in enumerate(sizes)]


def names(layout: ChunkLayout) -> list[list[str]]:
    return [[slot.name for slot in chunk.slots] for chunk in layout.chunks]


@given(ITEMS, st.integers(0, 20), st.integers(1, 4))
def test_every_parameter_has_one_place_among_its_like(items, capacity, shards):
    layout = pack(items, capacity, shards)
    by_name = {item.name: item for item in items}
    assert sorted(layout.chunk_of) == sorted(by_name)
    assert sum(len(chunk.slots) for chunk in layout.chunks) == len(items)
    for index, chunk in enumerate(layout.chunks):
        ends = list(itertools.accumulate((slot.numel for slot in chunk.slots), initial=0))
        assert [slot.offset for slot in chunk.slots] == ends[:-1]
        assert ends[-1] <= capacity or len(chunk.slots) == 1
        assert chunk.numel % shards == 0
        assert ends[-1] <= chunk.numel < ends[-1] + shards
        for slot in chunk.slots:
            assert by_name[slot.name] == Item(slot.name, slot.numel, chunk.dtype, chunk.trainable)
            assert layout.chunk_of[slot.name] == chunk.index == index


@given(ITEMS, st.integers(0, 20))
def test_chunks_are_filled_in_order(items, capacity):
    layout = pack(items, capacity)
    by_name = {item.name: item for item in items}
    for kind in {(item.dtype, item.trainable) for item in items}:
        chunks = [
            chunk for chunk in layout.chunks if (chunk.dtype, chunk.trainable) == kind and chunk.numel <= capacity
        ]
        order = [slot.name for chunk in chunks for slot in chunk.slots]
        assert order == [i.name for i in items if (i.dtype, i.trainable) == kind and by_name[i.name].numel <= capacity]
        for chunk, following in itertools.pairwise(chunks):
            assert chunk.numel + following.slots[0].numel > capacity


@given(ITEMS, st.integers(0, 20), st.integers(1, 4), st.integers(1, 4))
def test_what_is_in_which_chunk_is_known_without_the_chunks(items, capacity, shards, aligned):
    layout = pack(items, capacity, shards, aligned)
    filling = Packer(items, shards, aligned).fill(capacity)
    assert filling.chunk_of.tolist() == [layout.chunk_of[item.name] for item in items]
    assert filling.numels == [chunk.numel for chunk in layout.chunks]
    assert [items[first].name for first in filling.firsts] == [chunk.slots[0].name for chunk in layout.chunks]


@given(ITEMS, st.integers(1, 12), st.integers(1, 4))
def test_the_least_capacity_makes_no_more_chunks_than_asked_where_one_does(items, count, aligned):
    packer = Packer(items, aligned=aligned)
    total = sum(-(-item.numel // aligned) * aligned for item in items)
    fewest = len(packer.fill(total).firsts)
    assert len(packer.fill(packer.least_capacity(count, None)).firsts) <= max(count, fewest)


def test_candidates_that_cannot_be_best_are_not_tried():
    tried = []

    def cost(filling: ChunkAssignment) -> float:
        tried.append(len(filling.numels))
        return 10.0 * len(filling.numels)

    layout = search(trained(*[1] * 20), cost, least=lambda filling: 6.0 * len(filling.numels))
    assert len(layout.chunks) == 1
    assert tried == [1], "two chunks cost 12 at least, and one costs 10"
    items = trained(*(100 + 37 * index % 101 for index in range(60)))
    tried = []

    def cost(filling: ChunkAssignment) -> float:
        tried.append(len(filling.numels))
        return abs(len(filling.numels) - 48)

    assert len(search(items, cost).chunks) == 48
    assert len(tried) < 40


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.integers(0, 30))
def test_the_search_finds_the_best_of_all_capacities(sizes, overhead):
    """Where cost grows with the largest chunk and with their number: all counts of so few are tried.

    Below the largest parameter a smaller capacity may make fewer chunks, and not all of them are seen.
    """
    items = trained(*sizes)

    def cost(filling: ChunkAssignment) -> float:
        return max(filling.numels) + overhead * len(filling.numels)

    best = min(cost(Packer(items).fill(capacity)) for capacity in range(max(sizes), sum(sizes) + 1))
    found = search(items, cost)
    assert max(chunk.numel for chunk in found.chunks) + overhead * len(found.chunks) <= best


def count(filling: ChunkAssignment) -> float:
    return len(filling.numels)


def at_most_8(filling: ChunkAssignment) -> float | None:
    return None if max(filling.numels) > 8 else len(filling.numels)


def off_three(filling: ChunkAssignment) -> float:
    return abs(len(filling.numels) - 3)


@pytest.mark.parametrize(
    ("sizes", "cost", "options", "found"),
    [
        ([2] * 9, off_three, {}, [["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p6", "p7", "p8"]]),
        ([2, 2, 9, 2, 2], count, {"most": 4}, [["p0", "p1"], ["p2"], ["p3", "p4"]]),
        ([1, 2, 3], lambda filling: None, {"shards": 2}, [["p0"], ["p1"], ["p2"]]),
        ([4, 4, 4, 4], at_most_8, {"shards": 1}, [["p0", "p1"], ["p2", "p3"]]),
        ([4, 4, 4, 4], at_most_8, {"shards": 4}, [["p0", "p1"], ["p2", "p3"]]),
        ([], count, {}, []),
    ],
    ids=["even", "no larger than the most", "smallest where nothing fits", "fitting", "fitting shares", "nothing"],
)
def test_the_search_makes_chunks(sizes, cost, options, found):
    assert names(search(trained(*sizes), cost, **options)) == found


def test_parameters_begin_at_multiples():
    layout = pack(trained(3, 9, 1), 30, shards=2, aligned=8)
    assert layout.chunks[0].slots == (ChunkSlot("p0", 0, 3), ChunkSlot("p1", 8, 9), ChunkSlot("p2", 24, 1))
    assert layout.chunks[0].numel == 26
    assert len(search(trained(3, 9, 1), lambda filling: len(filling.numels), aligned=8).chunks) == 1
