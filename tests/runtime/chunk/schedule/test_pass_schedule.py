"""Bytes beside chunks at each operation of a pass."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atorch.runtime.chunk.pass_schedule import Access, AccessTrace, PassArrays, moments
from atorch.runtime.chunk.transfer_schedule import StepRuns

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
    found = PassArrays(foreseen, chunk_of).runs(np.array(list(chunk_of.values())), gathering, shards)
    plain = moments(foreseen, chunk_of, gathering, shards)
    assert found == StepRuns.of([each.needs for each in plain], [each.other_bytes for each in plain])
