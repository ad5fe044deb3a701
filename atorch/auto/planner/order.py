"""The order of dry runs: the baseline, autocast with it, single changes, combinations.

The baseline is what a careful user would write: plain training on one process, `ddp` on several; where that does not
fit, what is estimated fastest of those as exact that need no compiler and split nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.planner.estimate import Scored
from atorch.auto.strategy import EXACTNESS, Method, Phase, Strategy
from atorch.distributed.mesh import BATCH_AXES


class Turn(IntEnum):
    AUTOCAST = 0  # with the baseline, and nothing else
    SINGLE = 1  # one change of the baseline or of the best so far, or several that ran one by one
    COMBINED = 2
    COMPILED = 3
    SPLIT = 4  # over the processes of one node, where the model fits without


class Order:
    """The order of some candidates. `given` is a strategy whose knobs are searched: it is its own baseline."""

    def __init__(self, candidates: Sequence[Scored], given: Strategy | None = None, *, one_node: bool = True) -> None:
        self._slots = [_by_slot(each.strategy) for each in candidates]
        self._axes = [split_axes(each.strategy) for each in candidates]
        self._splits = list(map(len, self._axes))
        self._compiles = [compiles(each.strategy) for each in candidates]
        self._one_node = one_node
        self.candidates = candidates

        def simplicity(index: int) -> tuple[bool, int, bool, int, bool, float, int]:
            strategy = candidates[index].strategy
            extras = len(_extras(strategy))
            seconds = candidates[index].estimate.step_s
            own = given is None or strategy != given
            return own, _level(strategy), compiles(strategy), self._splits[index], extras > 0, seconds, extras

        self.simplest = sorted(range(len(candidates)), key=simplicity)

    def next_baseline(self, failed: Iterable[int]) -> int | None:
        """The simplest that has not failed: after a failure one that needs less memory, where there is one."""
        out = set(failed)
        left = [index for index in self.simplest if index not in out]
        least = min((self._peak(index) for index in out), default=float("inf"))
        return next((index for index in left if self._peak(index) < least), left[0] if left else None)

    def turn(self, index: int, baseline: int, best: int, measured: Iterable[int]) -> Turn:
        """When a candidate's turn is, given what was measured; the best of that is `best`."""
        if self._one_node and self._splits[index] > self._splits[baseline]:
            return Turn.SPLIT
        if self._compiles[index] and not self._compiles[baseline]:
            return Turn.COMPILED
        changes = self._changes(index, baseline)
        if len(changes) == 1 and _is_autocast(changes[0][1]):
            return Turn.AUTOCAST
        if min(len(changes), len(self._changes(index, best))) <= 1:
            return Turn.SINGLE
        alone = {found[0] for found in (self._changes(each, baseline) for each in measured) if len(found) == 1}
        return Turn.SINGLE if alone.issuperset(changes) else Turn.COMBINED

    def is_new(self, index: int, ran: Iterable[int]) -> bool:
        """True if a candidate splits the model as none that ran does, and compiles nothing."""
        if not self._axes[index] or self._compiles[index]:
            return False
        return all(self._axes[each] != self._axes[index] for each in ran)

    def _changes(self, index: int, other: int) -> list[tuple[str, Method | None]]:
        """The slots in which one differs from another, each with what it has there."""
        mine, theirs = self._slots[index], self._slots[other]
        return [(slot, mine.get(slot)) for slot in {**theirs, **mine} if mine.get(slot) != theirs.get(slot)]

    def _peak(self, index: int) -> float:
        return self.candidates[index].estimate.peak_bytes


def compiles(strategy: Strategy) -> bool:
    return any(each.phase == Phase.COMPILE for each in strategy)


def split_axes(strategy: Strategy) -> frozenset[str]:
    """The axes over which the model is split, beyond shards of what all have."""
    return frozenset(axis for each in strategy for axis in each.splits) - frozenset(BATCH_AXES)


def _extras(strategy: Strategy) -> list[Method]:
    """Methods beyond plain training on these processes."""
    mode = strategy.get(ParallelMode)
    rest: list[Method] = [each for each in strategy if not isinstance(each, (ParallelMode, Ddp))]
    return rest if mode is None or mode.size("data") == mode.size(*dict(mode.slices)) else [*rest, mode]


def _level(strategy: Strategy) -> int:
    return max((EXACTNESS.index(each.exactness) for each in strategy), default=0)


def _is_autocast(each: Method | None) -> bool:
    return each is not None and each.exactness == "autocast"


def _by_slot(strategy: Strategy) -> dict[str, Method]:
    return {each.slot: each for each in strategy}
