"""The assessment of a strategy that somebody has already: its estimate, if it fits, and the changes that gain most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from atorch.auto.planner.cluster_search import answer
from atorch.auto.planner.estimate import EstimateUncertainty, estimate_of, usable_bytes, usable_host_bytes
from atorch.auto.planner.explanation import Change, MemoryLimits, single_changes
from atorch.auto.planner.plan import ClusterPlan, Estimate, json_data
from atorch.auto.planner.request import EXPERTS, PlanRequest
from atorch.auto.planner.space import plannable, refusals, with_settings
from atorch.auto.strategy import PRECISIONS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import ModelProfile, StepTimes, plain_cost
from atorch.errors import NoFeasiblePlanError, StrategyError

WORTH = 0.005  # share of a step: a change that saves less is none


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """A strategy with its estimate for a cluster and a batch.

    Args:
        short: the reason why it does not fit, or None.
        refusals: reasons why atorch would not train so; the estimate is then of the same work.
        changes: single changes after which it fits or takes less time; of those that fit the fastest first.
        best: the best plan, or the reason in words why there is none.
    """

    strategy: Strategy
    estimate: Estimate
    cluster: ClusterSpec
    global_batch: int
    usable_bytes: float
    num_params: int
    short: str | None
    refusals: tuple[str, ...]
    changes: tuple[Change, ...]
    best: ClusterPlan | str

    @property
    def fits_narrowly(self) -> bool:
        return self.short is None and (self.estimate.high_needed_bytes or 0.0) > self.usable_bytes

    def to_json_data(self) -> dict[str, Any]:
        """Plain data; strategies in the list form of `load_strategy`."""
        return {
            **json_data(replace(self, changes=(), best="")),
            "memory_bytes": self.cluster.device.memory_bytes,
            "fits": self.short is None,
            "fits_narrowly": self.fits_narrowly,
            "changes": [self._change_data(change) for change in self.changes],
            "best": self.best if isinstance(self.best, str) else self.best.to_json_data(),
        }

    def _change_data(self, change: Change) -> Mapping[str, Any]:
        needed = change.estimate.needed_bytes
        return {
            "change": change.change,
            "what": change.what,
            "load_strategy": Strategy(change.methods).to_list(),
            "step_s": change.estimate.step_s,
            "needed_bytes": needed,
            "saves_s": self.estimate.step_s - change.estimate.step_s,
            "saves_bytes": self.estimate.needed_bytes - needed,
            "on_host_bytes": change.estimate.on_host_bytes,
            "fits": needed <= self.usable_bytes,
        }


def assess(profile: ModelProfile, cluster: ClusterSpec, strategy: Strategy, request: PlanRequest) -> Assessment:
    """Assess a complete strategy for a cluster; `request` has the global batch, and the bounds of better plans.

    Raises:
        StrategyError: a name in the request is unknown.
    """
    batch = profile.batch_size * cluster.world_size if request.global_batch is None else request.global_batch
    start = plain_cost(profile, batch, cluster.device.memory_bytes).replace(**request.trainer_traits.cost)
    times = StepTimes(cluster)
    limits = MemoryLimits(usable_bytes(cluster, request.reserve), usable_host_bytes(cluster, request.reserve))
    doubt = EstimateUncertainty(start, cluster, times)
    estimate = doubt.with_band(strategy.methods, estimate_of(strategy.cost(start), cluster, times))
    short = limits.short(estimate)
    on_host = any(method.keeps_on_host for method in strategy)
    precision = max((request.precision, *(method.precision_level for method in strategy)), key=PRECISIONS.index)
    knobs = {name: getattr(request, name) for name in ("excluded", "target")}
    host_memory = request.host_memory if request.host_memory is not None else short is not None or on_host
    space = with_settings(plannable(profile, cluster, precision=precision, host_memory=host_memory, **knobs), strategy)
    changes = single_changes(space, strategy.methods, start, limits, times)
    fitting = [change for change in changes if limits.short(change.estimate) is None]
    most = estimate.step_s * (1 - WORTH) if short is None else float("inf")
    best: ClusterPlan | str
    shared = (EXPERTS,) if EXPERTS in strategy.names() else ()
    try:
        best = answer(profile, cluster, replace(request, global_batch=batch, included=shared, fixed=None, extend=None))
    except (NoFeasiblePlanError, StrategyError) as error:
        best = str(error)
    return Assessment(
        strategy=strategy,
        estimate=estimate,
        cluster=cluster,
        global_batch=batch,
        usable_bytes=limits.device_bytes,
        num_params=profile.num_params,
        short=short,
        refusals=refusals(strategy, start, cluster),
        changes=tuple(change for change in fitting if change.estimate.step_s < most),
        best=best,
    )
