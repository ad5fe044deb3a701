"""Cuts into stages against brute force over all cuts."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch.errors import StrategyError
from atorch.runtime.pipeline.capture.partition import partition

Pairs = list[tuple[int, int]]


@dataclass
class Given:
    """What is to be cut; integers, so that cuts that are equally good are exactly so."""

    costs: list[int]
    stages: int
    memory: list[int]
    activations: list[int]
    in_flight: list[float]
    limit: float
    tied: Pairs = field(default_factory=list)

    def cut(self) -> tuple[int, ...]:
        return partition(
            self.costs, self.stages, self.memory, self.limit, activations=self.activations, in_flight=self.in_flight,
            tied=self.tied,
        )  # fmt: skip

    def all_cuts(self) -> Iterator[tuple[int, ...]]:
        """Every cut that is allowed."""
        for starts in itertools.combinations(range(1, len(self.costs)), self.stages - 1):
            spans = list(enumerate(zip((0, *starts), (*starts, len(self.costs)), strict=True)))
            fits = all(
                sum(self.memory[a:b]) + self.in_flight[s] * sum(self.activations[a:b]) <= self.limit
                for s, (a, b) in spans
            )
            if fits:
                yield (0, *starts)

    def merit(self, starts: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        """What the chosen cut has the least of."""
        spans = list(zip(starts, (*starts[1:], len(self.costs)), strict=True))
        sums = [sum(self.costs[a:b]) for a, b in spans]
        parted = sum(not any(a <= low and high < b for a, b in spans) for low, high in self.tied)
        return max(sums), parted, sum(each * each for each in sums), starts


@st.composite
def problems(draw: st.DrawFn) -> Given:
    count = draw(st.integers(1, 8))
    stages = draw(st.integers(1, count))
    figures = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    indices = st.integers(0, count - 1)
    pairs = st.lists(st.tuples(indices, indices).map(lambda pair: (min(pair), max(pair))), max_size=2)
    return Given(
        costs=draw(figures),
        stages=stages,
        memory=draw(figures),
        activations=draw(figures),
        in_flight=sorted(draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages)), reverse=True),
        limit=draw(st.one_of(st.just(math.inf), st.integers(0, 40))),
        tied=draw(pairs),
    )


@given(problems())
def test_the_cut_is_the_best_of_all(problem: Given) -> None:
    best = min(map(problem.merit, problem.all_cuts()), default=None)
    if best is None:
        with pytest.raises(StrategyError):
            problem.cut()
    else:
        assert problem.cut() == best[-1]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.data())
def test_the_slowest_stage_is_near_the_mean(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    starts = partition(costs, stages)
    slowest = max(sum(costs[a:b]) for a, b in zip(starts, (*starts[1:], len(costs)), strict=True))
    assert slowest <= (sum(costs) / stages + (1 - 1 / stages) * max(costs)) * (1 + 1e-9)


def test_heads_ties_and_activations_count() -> None:
    # 126 blocks on 16 stages, with an embedding and a head that are each about a block: 405B's layout.
    # 126 blocks on 16 stages, with an embedding and a head that are each about a block: 405B's layout.
    costs = [1.0] * 128
    starts = partition(costs, 16)
    assert starts == tuple(range(0, 128, 8))
    assert partition([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0], 2) == (0, 4)
    assert partition([1, 1, 1, 1], 3) == (0, 1, 2)
    assert partition([1, 1, 1, 1], 3, tied=[(1, 0)]) == (0, 2, 3)
    assert partition([1, 1, 1, 1], 3, tied=[(0, 3)]) == (0, 1, 2)
    assert partition([2, 2, 0, 2, 2], 2) == (0, 2)
    assert partition([2, 2, 0, 2, 2], 2, tied=[(1, 2)]) == (0, 3)
    costs, kept = [1] * 8, [1] * 8
    assert partition(costs, 2, activations=kept, in_flight=[2, 1]) == (0, 4)
    assert partition(costs, 2, limit=6, activations=kept, in_flight=[2, 1]) == (0, 3)


@pytest.mark.parametrize(
    ("costs", "stages", "told"),
    [
        *[([1.0, 1.0], stages, f"{stages} stages is asked of 2 units; give at most 2") for stages in (0, 3, 9)],
        *[([1.0, cost], 1, "unit 1 costs .*; a pipeline is cut by costs that are finite, at least 0")
          for cost in (-1.0, math.nan, math.inf)],
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(costs: list[float], stages: int, told: str) -> None:
    with pytest.raises(StrategyError, match=told):
        partition(costs, stages)


def test_what_fits_nowhere_is_told_with_the_bytes_and_the_units() -> None:
    names = ["embedding", "block.0", "block.1", "head"]
    told = r"needs the least has 30 B on stage 0 \(embedding to block.0\), 5 B too many"
    with pytest.raises(StrategyError, match=told):
        partition([1, 1, 1, 1], 2, [10, 20, 15, 5], 25, names=names)
    with pytest.raises(StrategyError, match=r"has 40 B on stage 1 \(unit 1\), 10 B too many"):
        partition([1, 1, 1], 3, [1, 40, 1], 30)
