"""Splits of small flows drawn by hand, where what is right is known."""

from hypothesis import given
from hypothesis import strategies as st

from atorch.profiler.dataflow import OpNode, derive

STREAM = 1  # the value that enters every block here
TOKENS = 10


def product(data, out, inner=8, columns=8, **kwargs):
    return OpNode(
        kind="product", reads=(data,), writes=(out,), data=data, rows=TOKENS, inner=inner, columns=columns,
        **{"splits": True, **kwargs},
    )  # fmt: skip


def other(reads, out, kind="other", **kwargs):
    return OpNode(kind=kind, reads=tuple(reads), writes=(out,), **kwargs)


def derived(nodes, **kwargs):
    return derive(nodes, {STREAM}, **kwargs)


def splits(nodes, **kwargs):
    return list(derived(nodes, **kwargs).splits.values())


def test_products_are_split_in_pairs():
    nodes = [product(STREAM, 2), other([2], 3), product(3, 4)]
    layout = derived([*nodes, other([STREAM, 4], 5, kind="sum")])
    assert list(layout.splits.values()) == ["columns", "rows"]
    assert layout.inside == {0, 1}
    assert layout.inside_values == {2, 3}

    assert splits([product(STREAM, 2), other([STREAM, 2], 3, kind="sum")]) == ["none"]

    assert splits(nodes, leaving=[4]) == ["columns", "rows"]
    assert splits(nodes, leaving=[3]) == ["none", "none"]

    chain = [product(value, value + 1) for value in range(1, 5)]
    assert splits(chain) == ["columns", "rows", "columns", "rows"]
    assert splits([*chain, product(5, 6)]) == ["columns", "rows", "columns", "rows", "none"]

    assert splits([product(STREAM, 2, splits=False), other([2], 3), product(3, 4)]) == ["none", "none"]

    gate, up = product(STREAM, 2), product(STREAM, 3)
    nodes = [gate, up, other([2, 3], 4), product(4, 5), other([STREAM, 5], 6, kind="sum")]
    assert splits(nodes) == ["columns", "columns", "rows"]
    assert splits([*nodes, other([STREAM, 3], 7)]) == ["none", "none", "none"]

    nodes = [other([STREAM], 2), product(2, 3, columns=1000), other([3], 4), other([4, 50], 5)]
    assert splits(nodes) == ["none"]
    layout = derived(nodes, vocabulary=1000)
    assert list(layout.splits.values()) == ["columns"]
    assert layout.inside == {1, 2, 3}


def test_streams_norms_and_adapters():
    mask, table = 100, 101
    nodes = [
        product(STREAM, 2), product(STREAM, 3), other([2, table], 4),  # rotated
        OpNode(kind="attention", reads=(4, 3, mask), writes=(5,), query=4, key=3),
        other([5, mask], 6), product(6, 7), other([STREAM, 7], 8, kind="sum"),
    ]  # fmt: skip
    layout = derived(nodes)
    assert list(layout.splits.values()) == ["columns", "columns", "rows"]
    assert (layout.attention, layout.queries, layout.keys) == (3, (0,), (1,))

    def flow(groups):
        return [product(STREAM, 2, columns=32), norm(2, 3, 32, groups), product(3, 4, inner=32)]

    assert splits(flow(groups=4)) == ["columns", "rows"]  # of each head
    # Normed tokens are a stream of their own, that the second product could have started from.
    assert splits([*flow(groups=1), product(4, 5)]) == ["none", "columns", "rows"]

    def flow(rank):
        return [
            product(STREAM, 2, inner=64, columns=64), product(STREAM, 3, inner=64, columns=rank),
            product(3, 4, inner=rank, columns=64), other([4], 5), other([2, 5], 6, kind="sum"),
            other([6], 7), product(7, 8, inner=64, columns=64),
        ]  # fmt: skip

    assert splits(flow(rank=4)) == ["columns", "none", "columns", "rows"]
    assert splits(flow(rank=64))[0] == "none"  # no adapter: two products are added to one


def norm(value, out, width, groups=1):
    return other([value], out, kind="reduction", elements=TOKENS * width, left=TOKENS * groups)


def test_routers_choose_experts_and_rows_of_tables():
    nodes = [
        product(STREAM, 2, columns=4), other([2], 3),  # scores
        other([3], 4, kind="choice", is_float=False), other([4], 5, is_float=False),  # which expert, sorted
        other([STREAM, 5], 6, kind="gather"), product(6, 7), other([7], 8), product(8, 9),
        other([9, 3], 10), other([STREAM, 10], 11, kind="sum"), product(11, 12),
    ]  # fmt: skip
    layout = derived(nodes)
    assert list(layout.splits.values())[:3] == ["none", "columns", "rows"]
    assert layout.of_experts == {5, 7}
    assert layout.dispatched == {6}

    ids, row = 100, 2
    looked_up = [other([ids], row, is_table=True), other([row], 3), product(3, 4), product(4, 5)]
    assert list(derive(looked_up, {row}).splits.values()) == ["columns", "rows"]
    biased = [
        product(STREAM, 2, columns=4), other([2], 3, kind="choice", is_float=False), product(STREAM, 4),
        other([3], 5, is_table=True), other([4, 5], 6, kind="sum"), product(6, 7), other([STREAM, 7], 8, kind="sum"),
    ]  # fmt: skip
    assert list(derive(biased, {STREAM, 5}).splits.values()) == ["none", "columns", "rows"]

    ends = other([100], 2, kind="choice", is_float=False)  # where a sequence ends
    assert derived([ends, other([STREAM, 2], 3, kind="gather"), product(3, 4)]).of_experts == set()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(1, 6)), max_size=12))
def test_every_split_value_comes_to_a_product_by_rows_or_ends(steps):
    """Any flow: what is split never meets a stream, and rows always follow columns."""
    nodes = [
        product(a, value) if is_product else other([a, b], value, kind="sum")
        for value, (is_product, a, b) in enumerate(steps, start=7)
    ]
    layout = derive(nodes, set(range(1, 7)))
    for place, node in enumerate(nodes):
        if node.kind == "sum" and place in layout.inside:
            touched = [value for value in node.reads if value in {v for n in nodes for v in n.writes}]
            assert any(value in layout.inside_values for value in touched)
        if layout.splits.get(place) == "rows":
            assert node.data in layout.inside_values
            assert place not in layout.inside
