"""Uncertainty of the estimate of a step, by kind of work.

An error is the logarithm of measured over estimated seconds. If kind k of work has the share w_k of a step, its
variance is

    s² = own² + common² + Σ (w_k · sigma_k)²,

and the variance of the difference of two plans on the same machine is twice own² plus Σ (Δw_k · sigma_k)². An error in
a kind of work affects both plans, so only kinds with different shares contribute.

Sigmas are fitted to published runs that did not stall, each source left out in turn. `python
benchmarks/planner_accuracy.py TABLE.csv … --leave-one-out` repeats the fit, and prints sigmas and the coverage of bands
on the sources left out. Errors follow Student's t with 4 degrees of freedom, for a few outliers. Every source has equal
weight, however many runs it has. The prior is 0.2 for each kind, within a factor of two. The user's own runs replace
them: `atorch calibrate --runs` writes a covariance to the cluster's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atorch.cluster.spec import ClusterSpec, LinkSpec
from atorch.cost.memory import uses_host
from atorch.cost.parallelism import EXPERT_AXIS
from atorch.cost.state import Cost
from atorch.cost.time import StepTimes

SIGMA: Mapping[str, float] = {
    "products": 0.07,
    "attention": 0.50,
    "traffic": 0.16,
    "launches": 0.13,
    "splits": 0.24,
    "sharding": 0.21,
    "pipeline": 0.19,
    "host": 0.50,
    "common": 0.06,
}
"""By kind of work; "common" is shared by all steps. No published run waits for its host; it gets the largest sigma."""
KINDS: Sequence[str] = tuple(SIGMA)
COMMON = "common"
OWN = 0.06  # of one plan alone: fitted to the order of otherwise equal runs
LOW, HIGH = -0.87, 2.53  # quantiles of errors over s
COVERED = 0.8  # of runs lie between them
LEAN = 0.28  # the median error over Σ w_k · sigma_k: work usually takes longer than estimated

SLOWER = 1.25  # factor by which a kind of work is slowed down, to measure its share of the step
_EFFICIENCY_FIELDS: Mapping[str, str] = {"products": "matmul", "attention": "attention", "traffic": "traffic"}
_AXES: Mapping[str, tuple[str, ...]] = {
    "splits": ("tensor", "sequence", "context", EXPERT_AXIS),
    "sharding": ("data", "zero"),
    "pipeline": ("pipeline",),
}
_BETWEEN_COPIES = frozenset(
    {"host", "sharding", "pipeline"}
)  # kinds of work that take place outside of a segment's copies

Shares = tuple[float, ...]  # one for each of `KINDS`


class Uncertainty:
    """Uncertainty of estimates of steps on one cluster.

    Args:
        slower: factor on a kind of work's seconds, to measure its share of a step; below 1 the work is faster, and
            hidden work has no share.
    """

    def __init__(self, cluster: ClusterSpec, times: StepTimes | None = None, slower: float = SLOWER) -> None:
        self._times, self._slower = times or StepTimes(cluster), slower
        self._slowed = {kind: slowed(cluster, {kind: slower}, self._times) for kind in KINDS if kind != COMMON}
        covariances = cluster.uncertainty or {kind: {kind: sigma**2} for kind, sigma in SIGMA.items()}
        self.covariance = tuple(tuple(covariances.get(one, {}).get(other, 0.0) for other in KINDS) for one in KINDS)

    def shares(self, cost: Cost) -> Shares:
        """Shares of kinds of work in a step: ∂ log step / ∂ log (seconds of the work), over a factor of `slower`.

        Hidden work has a share as far as the slowdown would expose it. A pipeline's share is its bubble and its sends.
        Since stages wait for work of other kinds, shares may add up to more than 1.
        """
        step = self._times.of(cost)
        if not step.total_s:
            return tuple(float(kind == COMMON) for kind in KINDS)
        slowed = {kind: times for kind, times in self._slowed.items() if _may_have(cost, kind)}
        slow = {kind: times.of(cost).total_s / step.total_s for kind, times in slowed.items()}
        share_of = {kind: max(0.0, math.log(ratio) / math.log(self._slower)) for kind, ratio in slow.items()}
        share_of["pipeline"] = share_of.get("pipeline", 0.0) + step.bubble_s / step.total_s
        share_of[COMMON] = 1.0
        return tuple(share_of.get(kind, 0.0) for kind in KINDS)

    def spread(self, shares: Shares) -> float:
        """The standard deviation s of one plan's error, a logarithm."""
        return math.sqrt(OWN**2 + self._variance(shares))

    def of_difference(self, one: Shares, other: Shares) -> float:
        return math.sqrt(2 * OWN**2 + self._variance([mine - yours for mine, yours in zip(one, other, strict=True)]))

    def of_kind(self, kind: str, one: Shares, other: Shares) -> float:
        """The change of the difference of two plans' errors by one sigma of a kind of work."""
        place = KINDS.index(kind)
        return (one[place] - other[place]) * math.sqrt(self.covariance[place][place])

    def band(self, step_s: float, shares: Shares) -> tuple[float, float]:
        """The interval of seconds that contains four of five steps with this estimate."""
        spread = self.spread(shares)
        return step_s * math.exp(LOW * spread), step_s * math.exp(HIGH * spread)

    def expected(self, step_s: float, shares: Shares) -> float:
        """The median seconds of a step: the more uncertain the work, the longer it is expected to take."""
        sigmas = [math.sqrt(row[place]) for place, row in enumerate(self.covariance)]
        leaning = LEAN * sum(share * sigma for share, sigma in zip(shares, sigmas, strict=True))
        return step_s * math.exp(leaning)

    def _variance(self, shares: Sequence[float]) -> float:
        rows = zip(shares, self.covariance, strict=True)
        variance = sum(share * sum(map(float.__mul__, row, shares)) for share, row in rows if share)
        return max(0.0, variance)


def _may_have(cost: Cost, kind: str) -> bool:
    """True if a step may have work of a kind; if not, evaluating the slowed step can be skipped."""
    axes = _AXES.get(kind)
    if axes is None:
        return kind != "host" or uses_host(cost)
    is_split = cost.size(*axes) > 1 or (EXPERT_AXIS in axes and cost.expert > 1)
    return is_split or any(comm.axis[0] in axes for comm in cost.comm)


def slowed(cluster: ClusterSpec, factors: Mapping[str, float], times: StepTimes | None = None) -> StepTimes:
    """Steps on a cluster on which kinds of work take `factors` times as long, except "common" and pipelines' bubbles.

    `times`: steps on `cluster` itself; its cached copies of segments are used where they are still valid.
    """
    factor_of = {**dict.fromkeys(KINDS, 1.0), **factors}
    device, host, host_factor = cluster.device, cluster.host, factor_of["host"]
    efficiency = {name: getattr(device.efficiency, name) / factor_of[kind] for kind, name in _EFFICIENCY_FIELDS.items()}
    device = replace(
        device,
        efficiency=replace(device.efficiency, **efficiency),
        launch_s=device.launch_s * factor_of["launches"],
    )
    if host is not None:
        cores = max(1, round(host.cores / host_factor))
        host = replace(host, memory_bandwidth=host.memory_bandwidth / host_factor, cores=cores)
    links = {
        axis: _with_links(cluster, factors[kind]) for kind, axes in _AXES.items() if kind in factors for axis in axes
    }
    changed = replace(cluster, device=device, host=host, host_link=_slower(cluster.host_link, host_factor))
    return StepTimes(changed, links, copies=times if factors.keys() <= _BETWEEN_COPIES else None)


def _with_links(cluster: ClusterSpec, slower: float) -> ClusterSpec:
    return replace(
        cluster,
        intra_node=_slower(cluster.intra_node, slower),
        inter_node=_slower(cluster.inter_node, slower),
        inter_leaf=None if cluster.inter_leaf is None else _slower(cluster.inter_leaf, slower),
    )


def _slower(link: LinkSpec, slower: float) -> LinkSpec:
    return replace(link, bandwidth=link.bandwidth / slower, latency_s=link.latency_s * slower)
