"""Best-first search for the fastest composition that fits: the branch with the smallest bound is opened next.

This is A* over the tree of compositions with an admissible heuristic (Hart, Nilsson and Raphael 1968, "A Formal Basis
for the Heuristic Determination of Minimum Cost Paths"). Once no open branch has a bound below the best result, nothing
better is left. Branches that tie with the best are then opened if they may fit with more room or be simpler. Branches
that cannot fit are put aside, and opened only if nothing fits.
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

from atorch.auto.planner.bounds import Bounds, LowerBound
from atorch.auto.planner.candidate_table import TIE, CandidateTable, Intricacy, least_intricacy
from atorch.auto.planner.space import Only, SearchNode, Space
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, StepTimes, peak_memory

PATIENCE = 4  # factor of the limit of visited branches while nothing fits

_Branch = tuple[float, int, SearchNode, LowerBound | None]  # bound, number, node, and the part of it; None: all


@dataclass(frozen=True)
class BestFound:
    """Scored compositions, and the numbers of those excluded by bounds."""

    columns: CandidateTable
    num_slow: int  # branches and compositions that were not opened or kept: none of them is the best, or simpler
    num_large: int  # branches that were not opened: nothing in them fits
    gap: float = 0.0  # share of the best one's seconds that an unopened branch might save; 0: it is proven the best

    @property
    def least_s(self) -> float:
        """Seconds of the fastest that fits; infinite if none does."""
        return min((self.columns.step_s[row] for row in self.columns.fitting), default=math.inf)


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
    """Score at least the `keep` fastest compositions that fit, and the simplest of those that tie with the fastest.

    Args:
        device_bytes, host_bytes: limits of a composition, on a device and in host memory for each device.
        breadth: score at least this many that fit, in the order of their bounds, to compare with.
        most: end without proof of the best after this many scores, once one fits; `gap` is the remaining uncertainty.
        most_looks: the same for visited branches; `PATIENCE` times as many while none fits.
        limit_s: score nothing slower than this.
        nearest: if nothing fits, score the compositions that miss by least.
        times: caches common terms of estimates.
    """
    times, columns = times or StepTimes(cluster), CandidateTable(device_bytes, host_bytes)
    with uncollected():
        return _Search(space, times, columns, keep, breadth, most, most_looks, limit_s).run(start, nearest=nearest)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector inside: a search makes no cycles, and repeated scans take a sixth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class _Search:
    """A search with a heap of branches by bound; a branch is a node at the depth of bounds, or a part of it."""

    space: Space
    times: StepTimes
    columns: CandidateTable
    keep: int
    breadth: int
    most: float
    most_looks: float
    limit_s: float

    def __post_init__(self) -> None:
        self._bounds = Bounds(self.space, self.times, self.columns.limit_bytes, self.columns.host_bytes)
        self._count = itertools.count()  # breaks ties: branches with equal bounds are opened in the order of discovery
        self._open: list[_Branch] = []
        self._aside: list[_Branch] = []  # branches that cannot fit, by missing bytes
        self._fitting: list[tuple[float, Intricacy]] = []  # seconds and intricacy, ascending
        self._num_slow = 0
        self._looks: float = 0

    def run(self, start: Cost, *, nearest: bool) -> BestFound:
        root, depth = self.space.root(start), self._bounds.depth
        if depth == len(self.space.levels):
            self._score(root, None)
        else:
            for node in self.space.descend(root, depth):
                heapq.heappush(self._open, (self._bounds.least_seconds(node), next(self._count), node, None))
        while self._open and self._open[0][0] <= self._enough_s() and not self._is_over():
            self._visit(*heapq.heappop(self._open))
        if nearest and not self._fitting:
            self._nearest()
        gap = max(0.0, 1 - self._open[0][0] / self._fitting[0][0]) if self._open and self._fitting else 0.0
        return BestFound(self.columns, self._num_slow + len(self._open), len(self._aside), gap)

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
        for leaf in self.space.leaves(node, only):
            seconds = self.times.of(leaf.cost).total_s
            if seconds > self._enough_s():
                self._num_slow += 1
                continue
            memory = peak_memory(leaf.cost)
            if self.columns.add(leaf.methods, seconds, memory):
                insort(self._fitting, (seconds, self.columns.intricacy(len(self.columns) - 1)))

    def _nearest(self) -> None:
        """Score the compositions that miss by least, from the branches put aside."""
        self._looks = min(self._looks, (PATIENCE - 1) * self.most_looks)
        while self._aside and not self._is_over():
            if self._aside[0][0] >= self.columns.least_short:
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
            return self._looks >= PATIENCE * self.most_looks
        return len(self.columns) >= self.most or self._looks >= self.most_looks

    def _enough_s(self) -> float:
        """Seconds beyond which a step is neither among the best nor a tie nor needed to compare."""
        wanted = max(self.keep, self.breadth)
        if len(self._fitting) < wanted:
            return self.limit_s
        return min(self.limit_s, max(self._fitting[self.keep - 1][0], self._fitting[0][0] * (1 + TIE)))

    def _is_known(self, bound: float, node: SearchNode, part: LowerBound | None) -> bool:
        """True if no composition of a branch is among the best, or ties with the best and is preferred to known ties.

        Bounds ascend, so once a bound exceeds the fastest result, that is the best.
        """
        if len(self._fitting) < max(self.keep, self.breadth) or bound < self._fitting[self.keep - 1][0]:
            return False
        limit = self._fitting[0][0] * (1 + TIE)
        ties = itertools.takewhile(lambda pair: pair[0] <= limit, self._fitting)
        return (least_intricacy(node, {} if part is None else part.only), bound) >= min(
            (how, seconds) for seconds, how in ties
        )
