"""Orders compositions by simplicity, the baseline first.

The baseline is the code of a careful user: plain training on one process, `ddp` on several. If that does not fit, it is
the composition that is estimated fastest among the equally exact ones without compiler and without split model.
"""

from __future__ import annotations

from collections.abc import Sequence

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.planner.plan import Scored
from atorch.auto.strategy import EXACTNESS, Method, Phase, Strategy
from atorch.distributed.mesh import BATCH_AXES


def simplest(candidates: Sequence[Scored], given: Strategy | None = None) -> list[int]:
    """The candidates in order, the baseline first. `given`, a strategy whose knobs are searched, is the baseline."""

    def simplicity(index: int) -> tuple[bool, int, bool, int, bool, float, int]:
        strategy = candidates[index].strategy
        extras = len(_extras(strategy))
        seconds = candidates[index].estimate.step_s
        is_other = given is None or strategy != given
        return is_other, _level(strategy), compiles(strategy), len(split_axes(strategy)), extras > 0, seconds, extras

    return sorted(range(len(candidates)), key=simplicity)


def compiles(strategy: Strategy) -> bool:
    return any(method.phase == Phase.COMPILE for method in strategy)


def split_axes(strategy: Strategy) -> frozenset[str]:
    """The axes over which the model is split; data-parallel shards do not count."""
    return frozenset(axis for method in strategy for axis in method.splits) - frozenset(BATCH_AXES)


def _extras(strategy: Strategy) -> list[Method]:
    """Methods in addition to plain training on these processes."""
    mode = strategy.get(ParallelMode)
    rest: list[Method] = [method for method in strategy if not isinstance(method, (ParallelMode, Ddp))]
    return rest if mode is None or mode.size("data") == mode.size(*dict(mode.slices)) else [*rest, mode]


def _level(strategy: Strategy) -> int:
    return max((EXACTNESS.index(method.exactness) for method in strategy), default=0)
