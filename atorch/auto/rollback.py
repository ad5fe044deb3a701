"""Applies a search's choice to the user's own model and undoes it on failure.

The choice ran on copies. The model itself may still fail: memory is short, or it has state that copies lack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from atorch.auto.context import Context
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, FaultBarrier, forget_compiled
from atorch.auto.strategy import Strategy
from atorch.distributed.mesh import set_current
from atorch.distributed.rng import RandomState
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.model.state import Snapshot
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.planner.plan import Plan

T = TypeVar("T")
MAX_ATTEMPTS = 24  # at applying the choice and the next best ones
MAX_KEPT = 50  # rejected compositions in a strategy's report


def adopt(ctx: Context, strategy: Strategy, plan: Plan, accelerate: Callable[..., T]) -> T:
    """Apply the search's choice, or the next best one after a failure, which leaves the model as before.

    Raises:
        NoFeasiblePlanError, StrategyError: all failed, or `MAX_ATTEMPTS` did.
    """
    for _ in range(MAX_ATTEMPTS):
        if plan.baseline is not None and plan.baseline.strategy == plan.strategy:
            return accelerate(ctx, strategy)
        need = None if plan.measured or plan.estimate is None else plan.estimate.memory.get("optimizer", 0.0)
        made, failure = attempt(ctx, partial(accelerate, strategy=strategy), need)
        if made is not None:
            return made
        assert plan.instead is not None, "of a search"
        plan = plan.instead(str(failure))
        logger.warning("%s", plan.notes[-1])
        metadata = {**strategy.metadata, "report": trimmed(plan.to_json_data())}
        strategy = replace(plan.strategy, metadata=metadata)
    raise StrategyError(f"{MAX_ATTEMPTS} strategies failed when they were applied: {plan.notes[-1]}")


def trimmed(report: dict[str, Any]) -> dict[str, Any]:
    """The report for a strategy's file: without compositions that were not run, whose estimates can be made again."""
    rejections = [rejection for rejection in report["rejected"] if rejection["why"] != "not run"][:MAX_KEPT]
    return {**report, "rejected": rejections}


def attempt(ctx: Context, work: Callable[[Context], T], more_bytes: float | None = None) -> tuple[T | None, str | None]:
    """Run `work` on the context's model; returns its result or the reason of a failure. All processes call it together.

    With `more_bytes`, `work` also fails if its peak on a GPU leaves less memory than that. A model that never took a
    step has no optimizer states yet.

    After a failure, the model with its values, buffers and gradients and the random states are restored on all
    processes. Process groups that `work` made are closed.
    """
    snapshot, random_state, results = Snapshot(ctx.root), RandomState.now(), list[T]()
    crew = Coordinator(ctx.world)

    def let_go() -> None:
        results.clear()
        snapshot.restore()  # a sharded model holds the group; ranks that wait in it wake only once it is released

    guard = FaultBarrier(ctx.world, crew, let_go, timeout_s=ctx.world.timeout.total_seconds())
    isolated = replace(ctx, rank_weights=[], unrounded={})

    def working() -> None:
        is_watched = more_bytes is not None and ctx.device.type == "cuda"
        if is_watched:
            torch.cuda.reset_peak_memory_stats(ctx.device)
        results.append(work(isolated))
        if is_watched:
            needed = torch.cuda.max_memory_allocated(ctx.device) + (more_bytes or 0.0)
            if needed > (room := torch.cuda.mem_get_info(ctx.device)[1]):
                raise MemoryError(
                    f"its first step would need {format_bytes(needed)} of memory, of {format_bytes(room)}"
                )

    try:
        for phase in (guard.connect, working):
            if guard.together(phase) is None:
                random_state.restore()
                forget_compiled()
                return None, guard.failure
        set_current(guard.mesh)
        return results[0], None
    finally:
        crew.close()
