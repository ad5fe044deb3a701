"""What a strategy needs to run on the processes that are there: the mesh filled, and a data-parallel method."""

from __future__ import annotations

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.strategy import Strategy
from atorch.distributed.mesh import BATCH_AXES

SLOT = "data_parallel"


def complete(strategy: Strategy, world_size: int) -> Strategy:
    """`strategy` with what several processes need, written out.

    A missing `parallel_mode` means that all processes are data-parallel; a present one gets its `data` axis resized.
    Where several processes see different samples and no method of the slot data_parallel is there, it is `ddp`.

    Raises:
        StrategyError: the sizes other than `data` do not divide the number of processes.
    """
    mode = strategy.get(ParallelMode)
    if mode is not None:
        strategy = strategy.with_method(mode.resized(world_size))
    elif world_size > 1:
        strategy = strategy.with_method(ParallelMode(slices=(("data", world_size),)))
    mode = strategy.get(ParallelMode)
    replicated = mode is not None and mode.size("data", "zero") > 1
    if replicated and not any(each.slot == SLOT for each in strategy):
        strategy = strategy.with_method(Ddp())
    return strategy


def idle_axes(strategy: Strategy) -> list[tuple[str, int]]:
    """The axes larger than 1 over which nothing in the strategy splits, with their sizes."""
    mode = strategy.get(ParallelMode)
    used = {axis for each in strategy for axis in each.splits} | set(BATCH_AXES)
    return [(axis, size) for axis, size in (mode.slices if mode else ()) if size > 1 and axis not in used]
