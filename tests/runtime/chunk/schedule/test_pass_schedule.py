"""Bytes beside chunks at each operation of a pass, and a deep model's pass as it follows from shallow ones."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch.runtime.chunk.pass_schedule import (
    FEWEST,
    Access,
    AccessTrace,
    PassStretch,
    Uses,
    deeper,
    moments,
    stretches,
)
from atorch.runtime.chunk.transfer_schedule import StepRuns

Size = Callable[[int, int], Sequence[int]]


def period_of(name: str) -> int | None:
    return int(name.partition(".")[2]) if "." in name else None


def later(name: str, periods: int) -> str:
    kind, _, number = name.partition(".")
    return f"{kind}.{int(number) + periods}" if number else name


def model(
    depth: int, forward: Size, head: Callable[[int], Sequence[int]], extra: bool = False
) -> tuple[AccessTrace, list[PassStretch]]:
    """A model of so many blocks, of two weights each, and the same in stretches.

    Args:
        forward: the bytes at each instant of a block, by its number and the depth.
        head: those at each instant of the head, by the depth.
        extra: something that only this one does.
    """
    done = [("embed", {"embed"}, [100])]
    done += [
        ("linear", {f"{kind}.{block}"}, forward(block, depth)) for block in range(depth) for kind in ("up", "down")
    ]
    done += [("head", {"embed"}, head(depth))] * (2 if extra else 1)
    gradients = []
    for block in reversed(range(depth)):
        done.append(("down (backward)", {f"down.{block}"}, [70 * block, 200 + 10 * depth]))
        gradients.append((len(done), f"down.{block}"))
        done.append(("up (backward)", {f"up.{block}", f"down.{block}"}, [300 + 70 * block]))
        gradients.append((len(done), f"up.{block}"))
    gradients.append((len(done), "embed"))
    found = AccessTrace([Access(name, frozenset(taken), max(sizes)) for name, taken, sizes in done], gradients)
    return found, stretches(found, [sizes for _, _, sizes in done], depth, period_of)


def told(depth: int, forward: Size, head: Callable[[int], Sequence[int]], odd: int = 0) -> AccessTrace | None:
    short = [model(few, forward, head, extra=few == odd)[1] for few in range(FEWEST, FEWEST + 3)]
    return deeper(short, later, depth - FEWEST)


def test_what_grows_evenly_is_told_to_the_byte() -> None:
    def forward(block: int, depth: int) -> Sequence[int]:
        return [900 + 5 * depth, 50 * block + 3 * depth, 20 * block]

    def head(depth: int) -> Sequence[int]:
        return [5000, 40 * depth]

    for depth in (FEWEST, FEWEST + 1, 40, 300):
        assert told(depth, forward, head) == model(depth, forward, head)[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda block, depth: [block * block],
        lambda block, depth: [depth * depth],
        lambda block, depth: [block] * (1 + block % 2),
        lambda block, depth: [7 if block == depth // 2 else 6],
    ],
    ids=["squares of the place", "squares of the depth", "instants of every other", "one in the middle"],
)
def test_what_does_not_is_not_told(forward: Size) -> None:
    assert told(40, forward, lambda depth: [0]) is None


@pytest.mark.parametrize("odd", range(FEWEST, FEWEST + 3))
def test_what_only_one_of_them_does_is_not_told(odd: int) -> None:
    assert told(40, lambda block, depth: [block], lambda depth: [0], odd) is None


CHUNK_OF = {"first": 0, "second": 1}


def beside(gradients: list[tuple[int, str]], count: int, gathering: list[int], shards: int) -> list[int]:
    """Bytes at each of `count` accesses, of which each alone has none."""
    accesses = [Access("take", frozenset({"first"}), 0) for _ in range(count)]
    return [moment.other_bytes for moment in moments(AccessTrace(accesses, gradients), CHUNK_OF, gathering, shards)]


def test_gradients_that_nobody_puts_together_were_counted_with_the_rest() -> None:
    assert beside([(1, "second"), (2, "first")], 3, [], 1) == [0, 0, 0]


def test_a_chunks_gradients_live_until_they_are_reduced_and_a_share_until_the_next_one_is_there() -> None:
    # The second's come in moment 0 and leave a share of 50; the first's come in moment 3, when both shares are there.
    assert beside([(1, "second"), (4, "first")], 6, [1000, 100], 2) == [100 + 50, 50, 50, 1000 + 50 + 500, 500, 500]


def test_chunks_are_reduced_in_the_order_in_which_they_are_complete() -> None:
    # What is there at once is reduced at once: the first share has just left when the second one does.
    assert beside([(2, "second"), (2, "first")], 3, [1000, 100], 2) == [0, 1100 + 50 + 500, 500]


def test_a_parameter_without_a_gradient_keeps_its_chunk_until_the_end() -> None:
    assert beside([(1, "second")], 3, [1000, 100], 2)[0] == 100 + 50
    two = {"first": 0, "second": 0}
    accesses = [Access("take", frozenset({"first"}), 0) for _ in range(3)]
    found = moments(AccessTrace(accesses, [(1, "second")]), two, [100], 2)
    assert [each.other_bytes for each in found] == [100, 100, 100 + 50]


@st.composite
def passes(draw: st.DrawFn) -> tuple[AccessTrace, dict[str, int]]:
    """A pass on up to six parameters, and the chunk of each; no chunk is empty."""
    names = [f"p{index}" for index in range(draw(st.integers(1, 6)))]
    taken = st.frozensets(st.sampled_from(names), min_size=1, max_size=3)
    accesses = draw(st.lists(st.builds(Access, st.just("op"), taken, st.integers(0, 9)), max_size=10))
    come = draw(st.lists(st.sampled_from(names), unique=True))
    positions = sorted(draw(st.lists(st.integers(0, len(accesses)), min_size=len(come), max_size=len(come))))
    drawn = [draw(st.integers(0, 3)) for _ in names]
    places = {chunk: place for place, chunk in enumerate(sorted(set(drawn)))}
    chunk_of = {name: places[chunk] for name, chunk in zip(names, drawn, strict=True)}
    return AccessTrace(accesses, list(zip(positions, come, strict=True))), chunk_of


@given(passes(), st.sampled_from([1, 2, 4]))
def test_runs_are_those_of_the_moments(made: tuple[AccessTrace, dict[str, int]], shards: int) -> None:
    foreseen, chunk_of = made
    gathering = [100 * (chunk + 1) for chunk in range(max(chunk_of.values()) + 1)] if shards > 1 else []
    found = Uses(foreseen, chunk_of).runs(np.array(list(chunk_of.values())), gathering, shards)
    plain = moments(foreseen, chunk_of, gathering, shards)
    assert found == StepRuns.of([each.needs for each in plain], [each.other_bytes for each in plain])
