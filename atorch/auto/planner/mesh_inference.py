"""The mesh for a strategy that splits the model and does not say into how many parts: the fastest by the estimate.

A method of the strategy whose axes the mesh does not have is left out of it: a model that is best not split is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import SLOT, complete
from atorch.auto.opt_lib.shared.mesh_constraints import disagreement
from atorch.auto.planner.estimate.score import estimate_of, usable_bytes
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import StrategyError
from atorch.units import format_bytes


@dataclass(frozen=True)
class _Tried:
    mode: ParallelMode
    cost: Cost | None  # None where it is not legal
    reason: str = ""


def lacks_degrees(strategy: Strategy) -> bool:
    """True if a strategy splits the model over axes of a mesh that it does not give; shards lie along any mesh."""
    return strategy.get(ParallelMode) is None and any(each.splits and each.slot != SLOT for each in strategy)


def fastest_mesh(strategy: Strategy, profile: ModelProfile, start: Cost, cluster: ClusterSpec) -> ParallelMode:
    """The mesh on which the strategy is estimated fastest, among those where it fits in memory.

    Raises:
        StrategyError: it is legal on no mesh of so many processes, or fits on none.
    """
    tried = [_on(strategy, mode, start, cluster) for mode in ParallelMode.choices(profile, cluster)]
    legal = [(each, estimate_of(each.cost, cluster)) for each in tried if each.cost is not None]
    fitting = [each for each in legal if each[1].needed_bytes <= usable_bytes(cluster)]
    if fitting:
        return min(fitting, key=lambda each: each[1].step_s)[0].mode
    if legal:
        nearest, estimate = min(legal, key=lambda each: each[1].needed_bytes)
        raise StrategyError(
            f"{strategy} fits on no mesh of {cluster.world_size} processes; the nearest is {nearest.mode}, which "
            f"needs {format_bytes(estimate.needed_bytes)} of {format_bytes(usable_bytes(cluster))} a device. "
            "Add fsdp, checkpoint or micro_batch, or use more processes"
        )
    raise StrategyError(
        f"{strategy} is legal on no mesh of {cluster.world_size} processes: {_reasons(tried)}. Give a parallel_mode"
    )


def on_mesh(strategy: Strategy, mode: ParallelMode, world_size: int) -> Strategy:
    """The strategy on a mesh, complete, without the methods that would split over axes which the mesh has not."""
    large = {name for name, size in mode.slices if size > 1}
    kept = tuple(each for each in strategy if not each.splits or large.intersection(each.splits))
    return complete(Strategy((*kept, mode), strategy.metadata), world_size)


def _on(strategy: Strategy, mode: ParallelMode, start: Cost, cluster: ClusterSpec) -> _Tried:
    """The strategy on one mesh, with its cost, or why it cannot be."""
    here = on_mesh(strategy, mode, cluster.world_size)
    reason = disagreement(here.methods, dict(mode.slices))
    cost = start
    for each in here:
        reason = reason or each.unfit(cost)
        if reason:
            return _Tried(mode, None, reason)
        cost = each.cost(cost)
    return _Tried(mode, cost)


def _reasons(tried: Iterable[_Tried]) -> str:
    return "; ".join(list(dict.fromkeys(each.reason for each in tried))[:3])
