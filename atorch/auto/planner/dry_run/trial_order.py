"""The simplest compositions: the baseline, and what is near it.

The baseline is what a careful user would write: plain training on one process, `ddp` on several; where that does not
fit, what is estimated fastest of those as exact that need no compiler and split nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.planner.estimate.score import Scored
from atorch.auto.strategy import EXACTNESS, Method, Phase, Strategy
from atorch.distributed.mesh import BATCH_AXES


def simplest(candidates: Sequence[Scored], given: Strategy | None = None) -> list[int]:
    """The candidates, the baseline first. `given` is a strategy whose knobs are searched: it is its own baseline."""

    def simplicity(index: int) -> tuple[bool, int, bool, int, bool, float, int]:
        strategy = candidates[index].strategy
        extras = len(_extras(strategy))
        seconds = candidates[index].estimate.step_s
        own = given is None or strategy != given
        return own, _level(strategy), compiles(strategy), len(split_axes(strategy)), extras > 0, seconds, extras

    return sorted(range(len(candidates)), key=simplicity)


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
