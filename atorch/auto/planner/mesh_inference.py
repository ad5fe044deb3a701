"""Finds the mesh that is estimated fastest for a strategy that splits the model and gives no mesh.

At least one of the methods that split the model has an axis larger than 1. Methods without one are left out, with a
warning.
"""

from __future__ import annotations

from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import SLOT, complete, disagreement
from atorch.auto.planner.estimate import estimate_of, usable_bytes
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import StrategyError
from atorch.units import format_bytes


def lacks_degrees(strategy: Strategy) -> bool:
    """True if a strategy splits the model and gives no mesh; data-parallel shards fit any mesh and do not count."""
    return strategy.get(ParallelMode) is None and any(method.splits and method.slot != SLOT for method in strategy)


def fastest_mesh(strategy: Strategy, profile: ModelProfile, start: Cost, cluster: ClusterSpec) -> ParallelMode:
    """The mesh on which the strategy is estimated fastest, among those where it fits in memory.

    Raises:
        StrategyError: the strategy is legal on no mesh of this many processes, or fits on none.
    """
    tried = [(mode, _cost_on(strategy, mode, start, cluster)) for mode in ParallelMode.choices(profile, cluster)]
    legal = [(mode, estimate_of(cost, cluster)) for mode, cost in tried if isinstance(cost, Cost)]
    fitting = [pair for pair in legal if pair[1].needed_bytes <= usable_bytes(cluster)]
    if fitting:
        return min(fitting, key=lambda pair: pair[1].step_s)[0]
    if legal:
        nearest, estimate = min(legal, key=lambda pair: pair[1].needed_bytes)
        raise StrategyError(
            f"{strategy} fits on no mesh of {cluster.world_size} processes; the nearest is {nearest}, which "
            f"needs {format_bytes(estimate.needed_bytes)} of {format_bytes(usable_bytes(cluster))} a device. "
            "Add fsdp, checkpoint or micro_batch, or use more processes"
        )
    reasons = "; ".join(list(dict.fromkeys(str(reason) for _, reason in tried))[:3])
    raise StrategyError(
        f"{strategy} is legal on no mesh of {cluster.world_size} processes: {reasons}. Give a parallel_mode"
    )


def on_mesh(strategy: Strategy, mode: ParallelMode, world_size: int) -> Strategy:
    """The complete strategy on a mesh, without methods that split over axes that the mesh lacks."""
    large = {name for name, size in mode.slices if size > 1}
    kept = tuple(method for method in strategy if not method.splits or large.intersection(method.splits))
    return complete(Strategy((*kept, mode), strategy.metadata), world_size)


def _cost_on(strategy: Strategy, mode: ParallelMode, start: Cost, cluster: ClusterSpec) -> Cost | str:
    """The strategy's cost on one mesh, or the reason why it is not legal there."""
    splitting = [method for method in strategy if method.splits and method.slot != SLOT]
    if not any(mode.size(*method.splits) > 1 for method in splitting):
        return f"{mode} splits no model by {' or '.join(method.name for method in splitting)}"
    here = on_mesh(strategy, mode, cluster.world_size)
    reason = disagreement(here.methods, dict(mode.slices))
    cost = start
    for method in here:
        reason = reason or method.unfit(cost)
        if reason:
            return reason
        cost = method.cost(cost)
    return cost
