"""The compositions with the least seconds that fit, found best first: the branch with the least bound is opened next.

That is A* over the tree of compositions, whose estimate of what is left never exceeds it (Hart, Nilsson and Raphael
1968, "A Formal Basis for the Heuristic Determination of Minimum Cost Paths"): once no open branch has a bound below
what was found, nothing better is left. Branches that cannot fit are put aside, and opened only where nothing fits.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atorch.auto.planner.bounds import Bounds
from atorch.auto.planner.columns import Columns
from atorch.auto.planner.space import Node, Space
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, StepTimes, peak_memory

TIE = 0.03  # of a step: nearer than the estimate is right
PATIENCE = 4  # times as many branches are looked at before it is believed that nothing fits

_Branch = tuple[float, int, int, Node]  # bound, number, index of its depth, node


@dataclass(frozen=True)
class Found:
    """What a search scored, and of what it knew enough without."""

    columns: Columns
    num_slow: int  # branches that were not opened: nothing in them is among the best
    num_large: int  # branches that were not opened: nothing in them fits
    gap: float = 0.0  # of the best one's seconds, what a branch that was not opened might save; 0 where that is proven


def best_first(
    space: Space,
    start: Cost,
    cluster: ClusterSpec,
    *,
    device_bytes: float = math.inf,
    host_bytes: float = math.inf,
    keep: int = 20,
    breadth: int = 0,
    most: float = math.inf,
    most_looks: float = math.inf,
    nearest: bool = True,
) -> Found:
    """The `keep` fastest compositions that fit and all that tie with the fastest; with some more.

    Where fewer than `breadth` were scored by then, the next ones in order of their bounds are, so that there is
    something to compare with. `device_bytes` and, for each device, `host_bytes` are what a composition may take; where
    nothing fits, those that miss by least are scored, unless `nearest` is off. Where `most` were scored and one fits,
    the search ends without proof that it is the best, and says how far from it it may be. So it does after `most_looks`
    at branches, or, where none fits, after `PATIENCE` times as many.
    """
    search = _Search(space, cluster, Columns(device_bytes, host_bytes), keep, breadth, most, most_looks)
    with _uncollected():
        return search.run(start, nearest=nearest)


@contextmanager
def _uncollected() -> Iterator[None]:
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
    """Branches wait in a heap by their bound; a branch is a node at one of the depths that have bounds."""

    def __init__(
        self,
        space: Space,
        cluster: ClusterSpec,
        columns: Columns,
        keep: int,
        breadth: int,
        most: float,
        most_looks: float,
    ) -> None:
        self.columns, self._space = columns, space
        self._keep, self._breadth, self._most, self._most_looks = keep, breadth, most, most_looks
        self._times = StepTimes(cluster)
        self._bounds = Bounds.of(space, self._times, columns.limit_bytes, columns.host_bytes)
        self._count = itertools.count()  # of equal bounds the branch that was found first is opened first
        self._open: list[_Branch] = []
        self._aside: list[_Branch] = []  # by the bytes that they are short
        self._best: list[float] = []  # seconds of the `keep` fastest that fit, ascending
        self._looks: float = 0

    def run(self, start: Cost, *, nearest: bool) -> Found:
        """Score until nothing better is left."""
        self._expand(self._space.root(start), 0, 0.0)
        while self._open and not self._is_over():
            if self._open[0][0] > self._enough_s() and len(self.columns) >= self._breadth:
                break
            self._visit(*heapq.heappop(self._open))
        if nearest and not self._best:
            self._nearest()
        gap = max(0.0, 1 - self._open[0][0] / self._best[0]) if self._open and self._best else 0.0
        return Found(self.columns, len(self._open), len(self._aside), gap)

    def _visit(self, bound: float, number: int, index: int, node: Node) -> None:
        """Look whether a branch can fit, and what that takes, before it is opened."""
        self._looks += 1
        short, seconds = self._bounds.fitting(node.cost, node.depth)
        if short > 0:
            heapq.heappush(self._aside, (short, number, index, node))
        elif seconds > bound:
            heapq.heappush(self._open, (seconds, number, index, node))
        else:
            self._expand(node, index + 1, bound)

    def _expand(self, node: Node, index: int, bound: float) -> None:
        """Bound the branches below a node at the depth of that index; below the last one, score."""
        if index == len(self._bounds.depths):
            self._score(node)
            return
        for below in self._space.descend(node, self._bounds.depths[index]):
            seconds = max(bound, self._bounds.least_seconds(below.cost, below.depth)) if index < 2 else bound
            heapq.heappush(self._open, (seconds, next(self._count), index, below))

    def _score(self, node: Node) -> None:
        for leaf in self._space.leaves(node):
            seconds = self._times.of(leaf.cost).total_s
            if self.columns.add(leaf.methods, seconds, peak_memory(leaf.cost)):
                insort(self._best, seconds)
                del self._best[self._keep :]

    def _nearest(self) -> None:
        """Score what misses by least, of what was put aside."""
        self._looks = min(self._looks, (PATIENCE - 1) * self._most_looks)
        while self._aside and not self._is_over():
            missed = self.columns.short_bytes
            if len(missed) and self._aside[0][0] >= missed.min():
                return
            _, _, index, node = heapq.heappop(self._aside)
            self._expand(node, index + 1, 0.0)
            while self._open and not self._is_over():
                self._visit(*heapq.heappop(self._open))

    def _is_over(self) -> bool:
        """Whether as much was done as may be."""
        if not self._best:
            return self._looks >= PATIENCE * self._most_looks
        return len(self.columns) >= self._most or self._looks >= self._most_looks

    def _enough_s(self) -> float:
        """What is slower than this is neither among the best nor ties with the best."""
        if not self._best:
            return math.inf
        kept = self._best[-1] if len(self._best) == self._keep else math.inf
        return max(kept, self._best[0] * (1 + TIE))
