"""Cuts a sequence of units into pipeline stages that minimize the time of the slowest stage.

Every micro-batch passes all stages, so the slowest one limits all. A cut is a choice of boundaries. The best cut of the
last units into the last stages does not depend on the cuts before. So a dynamic programme from the end finds it exactly
(as in PipeDream, Harlap et al. 2018, arXiv 1806.03377, section 3.2). Costs and bytes only grow with a stage, so a
search for its end stops early. Without a limit of bytes, the slowest of p stages takes at most the mean plus 1 - 1/p of
the largest unit (Bárány and Grolmusz 2013, arXiv 1308.2452).

Among the cuts with the fastest slowest stage, the result separates the fewest tied units. Further ties go to the most
even cut (least sum of squares), then to the earliest boundaries. Every rank gets the same, from the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from atorch.errors import StrategyError
from atorch.units import format_bytes

UnitRange = Callable[[int, int, int], float]
"""(stage, start, end) → the measure of the units from start to before end on that stage."""


def partition(
    costs: Sequence[float],
    stages: int,
    memory: Sequence[float] | None = None,
    limit: float | None = None,
    *,
    activations: Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    tied: Iterable[tuple[int, int]] = (),
    names: Sequence[str] = (),
) -> tuple[int, ...]:
    """The index of the first unit of each stage; none is empty.

    Args:
        costs: the cost of each unit in the order of execution, at least 0, all in one unit of measure.
        memory: bytes that each unit takes on any stage, such as its parameters and their optimizer states.
        limit: bytes that a stage may take; None: no limit.
        activations: bytes that each unit keeps of one micro-batch for its backward.
        in_flight: the number of micro-batches whose activations each stage keeps; None: one.
        tied: pairs of units that share parameters; one stage has both where the slowest stage stays as fast.
        names: names of the units, for messages.

    Raises:
        StrategyError: there are more stages than units, or no cut fits the limit.
    """
    count = len(costs)
    wrong = next((index for index, cost in enumerate(costs) if not 0.0 <= cost < math.inf), None)
    if wrong is not None:
        raise StrategyError(
            f"unit {wrong} costs {costs[wrong]}; a pipeline is cut by costs that are finite, at least 0"
        )
    if not 1 <= stages <= count:
        raise StrategyError(f"a pipeline of {stages} stages is asked of {count} units; give at most {count}")
    cost, held, kept = (_sums(figures, count) for figures in (costs, memory, activations))
    depth = [1.0] * stages if in_flight is None else in_flight
    cut = _Cut(
        count=count,
        stages=stages,
        cost=lambda stage, start, end: cost(start, end),
        bytes=lambda stage, start, end: held(start, end) + depth[stage] * kept(start, end),
        limit=math.inf if limit is None else limit,
    )
    slowest, _ = cut.least_largest(cut.cost)
    if slowest == math.inf:
        raise StrategyError(_too_large(cut, names))
    return cut.most_even(slowest, [(min(pair), max(pair)) for pair in tied])


def _sums(figures: Sequence[float] | None, count: int) -> Callable[[int, int], float]:
    before = list(accumulate(figures if figures is not None else [0.0] * count, initial=0.0))
    return lambda start, end: before[end] - before[start]


@dataclass(frozen=True)
class _Cut:
    """Tables of possible cuts, by stage and by the stage's first unit."""

    count: int  # of units
    stages: int
    cost: UnitRange
    bytes: UnitRange
    limit: float

    def least_largest(self, measure: UnitRange) -> tuple[float, tuple[int, ...]]:
        """The least measure of the largest stage over all cuts within the limit, and a cut that attains it.

        Infinity and an empty cut, where none is within the limit.
        """
        best: dict[int, tuple[float, tuple[int, ...]]] = {self.count: (0.0, ())}
        for stage in reversed(range(self.stages)):
            here: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start in self._firsts(stage):
                least: tuple[float, tuple[int, ...]] = (math.inf, ())
                for end, size in self._ends(stage, start, measure):
                    if size >= least[0]:
                        break
                    largest, rest = best.get(end, (math.inf, ()))
                    least = min(least, (max(size, largest), (start, *rest)))
                here[start] = least
            best = here
        return best[0]

    def most_even(self, slowest: float, tied: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The best cut (see above) of those whose stages all cost at most `slowest`."""
        best: dict[int, tuple[int, float, tuple[int, ...]]] = {self.count: (0, 0.0, ())}
        for stage in reversed(range(self.stages)):
            here: dict[int, tuple[int, float, tuple[int, ...]]] = {}
            for start in self._firsts(stage):
                for end, cost in self._ends(stage, start, self.cost):
                    if cost > slowest:
                        break
                    if end in best:
                        separated, squares, rest = best[end]  # separated pairs, up to a constant
                        separated -= sum(start <= low and high < end for low, high in tied)
                        candidate = (separated, squares + cost * cost, (start, *rest))
                        here[start] = min(here.get(start, candidate), candidate)
            best = here
        return best[0][2]

    def _firsts(self, stage: int) -> Iterable[int]:
        """Units where a stage can begin, so that the stages before and from it on have a unit each."""
        if stage == 0:
            return (0,)
        return range(stage, self.count + 1 - (self.stages - stage))

    def _ends(self, stage: int, start: int, measure: UnitRange) -> Iterator[tuple[int, float]]:
        """`(end, measure)` of the possible stages that begin at `start`, the shortest first."""
        later = self.stages - stage - 1
        for end in range(start + 1, self.count - later + 1) if later else (self.count,):
            if self.bytes(stage, start, end) > self.limit:
                return
            yield end, measure(stage, start, end)


def _too_large(cut: _Cut, names: Sequence[str]) -> str:
    """The message on the cut that needs the least memory: its largest stage and the excess there."""
    least, starts = _Cut(cut.count, cut.stages, cut.cost, cut.bytes, math.inf).least_largest(cut.bytes)
    ends = (*starts[1:], cut.count)
    spans = list(enumerate(zip(starts, ends, strict=True)))
    stage, (start, end) = max(spans, key=lambda item: cut.bytes(item[0], *item[1]))
    label = [names[index] if names else f"unit {index}" for index in (start, end - 1)]
    where = label[0] if end - start == 1 else f"{label[0]} to {label[1]}"
    return (
        f"no cut into {cut.stages} stages fits {format_bytes(cut.limit)} a stage: the one that needs the least has "
        f"{format_bytes(least)} on stage {stage} ({where}), {format_bytes(least - cut.limit)} too many; use more "
        "stages, smaller micro-batches, or a method that shards or recomputes"
    )
