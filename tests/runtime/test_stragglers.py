"""Who is slow, by arithmetic alone."""

from __future__ import annotations

import random

import pytest

from atorch.runtime.stragglers import StepReport, Straggler, behind


def slow(own: list[float], whole: float = 100.0, units: list[int] | None = None, peers: list[int] | None = None):
    size = len(own)
    return behind(own, [whole] * size, 0.1, units or list(range(size)), peers or [0] * size)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([20, 20], {}),
        ([20, 30], {}),  # a tenth of the step, and not more
        ([20, 31], {(1,): (31, 20)}),
        ([20, 20, 20, 50], {(3,): (50, 20)}),
        ([20, 50, 20, 50, 20], {(1,): (50, 20), (3,): (50, 20)}),
        ([1, 20, 20, 20], {}),  # one that is quick
        ([0, 15, 30, 45, 60, 75], {}),  # all differ: none stands out
        ([0], {}),
    ],
)
def test_who_stands_out_of_the_median(own, expected):
    assert slow(own) == expected


def test_times_that_vary_name_nobody_and_one_far_outside_is_named():
    draw = random.Random(0)
    for _ in range(20):
        own = [draw.gauss(50, 10) for _ in range(512)]
        assert len(slow(own)) <= 1, "four standard deviations: one of 30,000"
        own[77] += 100
        assert (77,) in slow(own)


def test_who_waits_in_the_midst_of_its_work_is_not_slow():
    """Rank 0 came late, and rank 1 waited for it: the time of the one that did not wait is that of both."""
    assert slow([20, 50, 20, 20], units=[0, 0, 2, 2]) == {}
    assert slow([50, 50, 20, 20], units=[0, 0, 2, 2]) == {(0, 1): (50, 20)}
    assert slow([50, 90], units=[0, 0]) == {}


def test_those_with_other_work_are_no_peers():
    assert slow([20, 20, 50, 50], peers=[0, 0, 1, 1]) == {}
    assert slow([20, 20, 50, 70], peers=[0, 0, 1, 1]) == {(3,): (70, 50)}


def test_what_is_said():
    one = Straggler((3,), ("node-b",), "forward", 0.05, 0.02, 3)
    assert str(one) == "rank 3 on node-b takes 50 ms a step for forward, where the median is 20 ms"
    several = Straggler(tuple(range(10)), ("a",) * 5 + ("b",) * 5, "forward", 0.05, 0.02, 3)
    assert str(several).startswith(
        "one of ranks 0, 1, 2, 3, 4, 5, 6, 7, …, which wait for one another in it, on a, b takes 50 ms"
    )
    report = StepReport(50, [0.1, 0.1, 0.1], {"data": [0.001, 0.03, 0.002]})
    assert str(report) == (
        "step 50: least / median / most of 3 processes: whole 100 ms / 100 ms / 100 ms, data 1 ms / 2 ms / 30 ms"
    )
