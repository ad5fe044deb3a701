"""The composition with the least seconds that fits, found best first: the branch with the least bound is opened next.

That is A* over the tree of compositions, whose estimate of what is left never exceeds it (Hart, Nilsson and Raphael
1968, "A Formal Basis for the Heuristic Determination of Minimum Cost Paths"): once no open branch has a bound below
what was found, nothing better is left. What ties with the best is then opened as far as it may be simpler than what
was found. Branches that cannot fit are put aside, and opened only where nothing fits.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atorch.auto.planner.estimate.candidate_table import CandidateTable
from atorch.auto.planner.estimate.tie_breaking import TIE, Intricacy, intricacy, least_intricacy
from atorch.auto.planner.search.bounds import Bounds, LowerBound
from atorch.auto.planner.search.space import Only, SearchNode, Space
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, StepTimes, peak_memory

PATIENCE = 4  # times as many branches are looked at before it is believed that nothing fits

_Branch = tuple[float, int, SearchNode, LowerBound | None]  # bound, number, node, and what of it, or all


@dataclass(frozen=True)
class BestFound:
    """Results of a search, and what it knew enough of without."""

    columns: CandidateTable
    num_slow: int  # branches and compositions that were not opened or kept: none of them is the best, or simpler
    num_large: int  # branches that were not opened: nothing in them fits
    gap: float = 0.0  # of the best one's seconds, what a branch that was not opened might save; 0 where that is proven

    @property
    def least_s(self) -> float:
        """Seconds of the fastest that fits; infinite where none does."""
        return float(self.columns.step_s[self.columns.fits].min(initial=math.inf))


def best_first(
    space: Space,
    start: Cost,
    cluster: ClusterSpec,
    *,
    device_bytes: float = math.inf,
    host_bytes: float = math.inf,
    keep: int = 1,
    breadth: int = 0,
    most: float = math.inf,
    most_looks: float = math.inf,
    limit_s: float = math.inf,
    nearest: bool = True,
    times: StepTimes | None = None,
) -> BestFound:
    """The `keep` fastest compositions that fit, and the simplest of those that tie with the fastest; with some more.

    Where fewer than `breadth` that fit were scored by then, the next ones in order of their bounds are, so that there
    is something to compare with; nothing that takes longer than `limit_s` is. `device_bytes` and, for each device,
    `host_bytes` are what a composition may take; where nothing fits, those that miss by least are scored, unless
    `nearest` is off. Where `most` were scored and one fits, the search ends without proof that it is the best, and says
    how far from it it may be. So it does after `most_looks` at branches, or, where none fits, after `PATIENCE` times as
    many. `times` keeps what estimates have in common.
    """
    times, columns = times or StepTimes(cluster), CandidateTable(device_bytes, host_bytes)
    with uncollected():  # what the search kept is gone by its end
        return _Search(space, times, columns, keep, breadth, most, most_looks, limit_s).run(start, nearest=nearest)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles: a search makes none, and would have all that it keeps looked through over and
    over, a sixth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Search:
    """Branches wait in a heap by their bound: parts of the nodes at the depth that has bounds."""

    def __init__(
        self,
        space: Space,
        times: StepTimes,
        columns: CandidateTable,
        keep: int,
        breadth: int,
        most: float,
        most_looks: float,
        limit_s: float,
    ) -> None:
        self.columns, self._space = columns, space
        self._keep, self._breadth, self._most, self._most_looks = keep, breadth, most, most_looks
        self._limit_s = limit_s
        self._times = times
        self._bounds = Bounds(space, self._times, columns.limit_bytes, columns.host_bytes)
        self._count = itertools.count()  # of equal bounds the branch that was found first is opened first
        self._open: list[_Branch] = []
        self._aside: list[_Branch] = []  # by the bytes that they are short
        self._fitting: list[tuple[float, Intricacy]] = []  # seconds and intricacy, ascending
        self._num_slow = 0
        self._looks: float = 0

    def run(self, start: Cost, *, nearest: bool) -> BestFound:
        self._begin(start)
        while self._open and self._open[0][0] <= self._enough_s() and not self._is_over():
            self._visit(*heapq.heappop(self._open))
        if nearest and not self._fitting:
            self._nearest()
        gap = max(0.0, 1 - self._open[0][0] / self._fitting[0][0]) if self._open and self._fitting else 0.0
        return BestFound(self.columns, self._num_slow + len(self._open), len(self._aside), gap)

    def _begin(self, start: Cost) -> None:
        root, depth = self._space.root(start), self._bounds.depth
        if depth == len(self._space.levels):
            self._score(root, None)
            return
        for node in self._space.descend(root, depth):
            heapq.heappush(self._open, (self._bounds.least_seconds(node), next(self._count), node, None))

    def _push(self, node: SearchNode, parts: Iterable[LowerBound], bound: float = 0.0, short: float = 0.0) -> None:
        for part in parts:
            if max(short, part.short_bytes) > 0:
                heapq.heappush(self._aside, (max(short, part.short_bytes), next(self._count), node, part))
            else:
                heapq.heappush(self._open, (max(bound, part.seconds), next(self._count), node, part))

    def _visit(self, bound: float, _: int, node: SearchNode, part: LowerBound | None) -> None:
        if self._is_known(bound, node, part):
            self._num_slow += 1
            return
        self._looks += 1
        if part is None:
            self._push(node, self._bounds.parts(node), bound=bound)
        elif part.is_settled:
            self._score(node, part.only)
        else:
            self._push(node, self._bounds.cut(part, self._enough_s()), bound=bound)

    def _score(self, node: SearchNode, only: Only | None) -> None:
        for leaf in self._space.leaves(node, only):
            seconds = self._times.of(leaf.cost).total_s
            if seconds > self._enough_s():
                self._num_slow += 1
                continue
            memory = peak_memory(leaf.cost)
            if self.columns.add(leaf.methods, seconds, memory):
                insort(self._fitting, (seconds, intricacy(leaf.methods, on_host=memory.on_host > 0)))

    def _nearest(self) -> None:
        """Score what misses by least, of what was put aside."""
        self._looks = min(self._looks, (PATIENCE - 1) * self._most_looks)
        while self._aside and not self._is_over():
            missed = self.columns.short_bytes
            if len(missed) and self._aside[0][0] >= missed.min():
                return
            short, _, node, part = heapq.heappop(self._aside)
            assert part is not None, "what is short is known of parts alone"
            self._looks += 1
            if part.is_settled:
                self._score(node, part.only)
            else:
                self._push(node, self._bounds.cut(part), short=short)

    def _is_over(self) -> bool:
        if not self._fitting:
            return self._looks >= PATIENCE * self._most_looks
        return len(self.columns) >= self._most or self._looks >= self._most_looks

    def _enough_s(self) -> float:
        """Seconds beyond which a step is not among the best, does not tie, and is not needed to compare."""
        wanted = max(self._keep, self._breadth)
        if len(self._fitting) < wanted:
            return self._limit_s
        return min(self._limit_s, max(self._fitting[self._keep - 1][0], self._fitting[0][0] * (1 + TIE)))

    def _is_known(self, bound: float, node: SearchNode, part: LowerBound | None) -> bool:
        """True if nothing of a branch is among the best, or both ties with the best and is simpler than what does.

        Bounds ascend: once one is above what was found, that is the best.
        """
        if len(self._fitting) < max(self._keep, self._breadth) or bound < self._fitting[self._keep - 1][0]:
            return False
        limit = self._fitting[0][0] * (1 + TIE)
        ties = itertools.takewhile(lambda each: each[0] <= limit, self._fitting)
        return (least_intricacy(node, {} if part is None else part.only), bound) >= min(
            (how, seconds) for seconds, how in ties
        )
