"""The bound of what must be fetched: worked by hand, and against filling the room byte by byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch.runtime.chunk.transfer_schedule import ScheduleStep, TransferSchedule, schedule
from benchmarks.traffic_bound import lower_bound


def moments(*needs_and_others: tuple[set[int], int]) -> list[ScheduleStep]:
    return [ScheduleStep("op", frozenset(needs), other) for needs, other in needs_and_others]


def test_what_must_be_fetched_by_hand():
    assert lower_bound(moments(({0}, 0), (set(), 7), ({0}, 0)), [5], 10) == pytest.approx(5 + 2)

    assert lower_bound(moments(({0}, 5), ({0}, 5)), [5], 10) == pytest.approx(5)

    step = moments(({0}, 0), ({1}, 0), (set(), 4), ({1}, 0), ({0}, 0))
    assert lower_bound(step, [4, 4], 8) == pytest.approx(8 + 4)

    assert lower_bound(moments(({0}, 0), ({1}, 0)), [3, 4], 5) == pytest.approx(7)

    assert lower_bound([], [3], 5) == 0

    assert lower_bound(moments(({0, 1}, 1)), [3, 4], 7) == float("inf")


@given(st.data())
def test_single_bytes_are_fetched_as_often_as_parameters_of_so_many(data):
    """A schedule of one-byte chunks, which is optimal, does what the programme finds: bytes need no common fate."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    needs = st.sets(st.integers(0, len(sizes) - 1), max_size=2)
    step = moments(*data.draw(st.lists(st.tuples(needs, st.integers(0, 3)), max_size=9)))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    by_byte = [
        each._replace(needs=frozenset(starts[one] + offset for one in each.needs for offset in range(sizes[one])))
        for each in step
    ]
    budget = data.draw(st.integers(4, 12))
    found = schedule(by_byte, [1] * sum(sizes), budget)
    bound = lower_bound(step, sizes, budget)
    assert bound == pytest.approx(found.fetched_bytes if isinstance(found, TransferSchedule) else float("inf"))
