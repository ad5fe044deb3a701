"""Uncertainty of the estimate of a step, by kind of work.

An error is the logarithm of measured over estimated seconds. Of a step whose share of kind k of work is w_k, its
variance is

    s² = own² + common² + Σ (w_k · sigma_k)²,

and of the difference of two plans on the same machine own² twice and Σ (Δw_k · sigma_k)²: what is wrong about a kind of
work is wrong in both, so that plans differ by the kinds of which they have different shares.

Sigmas are fitted to published runs that did not stall and whose source was left out (`python
benchmarks/planner_accuracy.py TABLE.csv … --leave-one-out` fits them again, prints them, and what bands hold of sources
that these sigmas were not fitted on): Student's t with 4 degrees of freedom, since few are far off; every source has
one say, however many runs it has; around 0.2 each, within a factor of two. Runs of the user's own replace them: `atorch
calibrate --runs` leaves a covariance in the cluster's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from atorch.cluster.spec import ClusterSpec, LinkSpec
from atorch.cost.comm.communication import EXPERT_AXIS
from atorch.cost.memory import uses_host
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
"""By kind of work; "common" is of every step alike. No published run waits for its host: "host" is as badly known as
what is known worst."""
KINDS: Sequence[str] = tuple(SIGMA)
COMMON = "common"
OWN = 0.06  # of one plan alone: fitted to the order of runs within a cell, which everything else that is alike leaves
LOW, HIGH = -0.87, 2.53  # quantiles of errors over s
COVERED = 0.8  # of runs that are between them
LEAN = 0.28  # of Σ w_k · sigma_k, the median error: work takes longer than estimated more often than not

SLOWER = 1.25  # times as long: what a kind of work is slowed down by, to see what the step makes of it
_REACHED: Mapping[str, str] = {"products": "matmul", "attention": "attention", "traffic": "traffic"}
_AXES: Mapping[str, tuple[str, ...]] = {
    "splits": ("tensor", "sequence", "context", EXPERT_AXIS),
    "sharding": ("data", "zero"),
    "pipeline": ("pipeline",),
}

Shares = tuple[float, ...]  # one for each of `KINDS`


class Uncertainty:
    """Uncertainty of estimates of steps on one cluster.

    Args:
        slower: how many times as long a kind of work takes where its share in a step is looked for; below 1 it is
            quicker, and work that others hide has no share.
    """

    def __init__(self, cluster: ClusterSpec, times: StepTimes | None = None, slower: float = SLOWER) -> None:
        self._times, self._slower = times or StepTimes(cluster), slower
        self._slowed = {kind: _slowed(cluster, kind, self._times, slower) for kind in KINDS if kind != COMMON}
        known = cluster.uncertainty or {kind: {kind: sigma**2} for kind, sigma in SIGMA.items()}
        self.covariance = tuple(tuple(known.get(one, {}).get(other, 0.0) for other in KINDS) for one in KINDS)

    def shares(self, cost: Cost) -> Shares:
        """Shares of kinds of work in a step: ∂ log step / ∂ log (seconds of the work), over a factor of `slower`.

        Work that others hide has a share as far as it would show. A pipeline's is its bubble besides what it sends; as
        stages wait for work of other kinds, shares may add up to more than 1.
        """
        step = self._times.of(cost)
        if not step.total_s:
            return tuple(float(kind == COMMON) for kind in KINDS)
        slowed = {kind: times for kind, times in self._slowed.items() if _may_have(cost, kind)}
        slow = {kind: times.of(cost).total_s / step.total_s for kind, times in slowed.items()}
        found = {kind: max(0.0, math.log(ratio) / math.log(self._slower)) for kind, ratio in slow.items()}
        found["pipeline"] = found.get("pipeline", 0.0) + step.bubble_s / step.total_s
        found[COMMON] = 1.0
        return tuple(found.get(kind, 0.0) for kind in KINDS)

    def spread(self, shares: Shares) -> float:
        """s: the standard deviation of one plan's error, a logarithm."""
        return math.sqrt(OWN**2 + self._variance(shares))

    def apart(self, one: Shares, other: Shares) -> float:
        """The standard deviation of the difference of two plans' errors."""
        return math.sqrt(2 * OWN**2 + self._variance([mine - yours for mine, yours in zip(one, other, strict=True)]))

    def of_kind(self, kind: str, one: Shares, other: Shares) -> float:
        """The effect of one sigma of one kind of work on the difference of two plans' errors."""
        place = KINDS.index(kind)
        return (one[place] - other[place]) * math.sqrt(self.covariance[place][place])

    def band(self, step_s: float, shares: Shares) -> tuple[float, float]:
        """The interval of seconds that holds four of five steps with this estimate."""
        spread = self.spread(shares)
        return step_s * math.exp(LOW * spread), step_s * math.exp(HIGH * spread)

    def expected(self, step_s: float, shares: Shares) -> float:
        """The seconds that a step is as likely to exceed as not: what is known less well is expected to take longer."""
        sigmas = [math.sqrt(row[place]) for place, row in enumerate(self.covariance)]
        leaning = LEAN * sum(share * sigma for share, sigma in zip(shares, sigmas, strict=True))
        return step_s * math.exp(leaning)

    def _variance(self, shares: Sequence[float]) -> float:
        rows = zip(shares, self.covariance, strict=True)
        of_all = sum(share * sum(map(float.__mul__, row, shares)) for share, row in rows if share)
        return max(0.0, of_all)


def _may_have(cost: Cost, kind: str) -> bool:
    """True if a step may have work of a kind; each slowed step is as slow to tell as the step itself."""
    axes = _AXES.get(kind)
    if axes is None:
        return kind != "host" or uses_host(cost)
    is_split = cost.size(*axes) > 1 or (EXPERT_AXIS in axes and cost.expert > 1)
    return is_split or any(each.axis[0] in axes for each in cost.comm)


def _slowed(cluster: ClusterSpec, kind: str, times: StepTimes, slower: float) -> StepTimes:
    """Steps on a cluster on which one kind of work takes `slower` times as long."""
    device = cluster.device
    if kind in _REACHED:
        name, reached = _REACHED[kind], device.efficiency
        device = replace(device, efficiency=replace(reached, **{name: getattr(reached, name) / slower}))
        return StepTimes(replace(cluster, device=device))
    if kind == "launches":
        return StepTimes(replace(cluster, device=replace(device, launch_s=device.launch_s * slower)))
    if kind == "host":
        host = cluster.host
        if host is not None:
            cores = max(1, round(host.cores / slower))
            host = replace(host, memory_bandwidth=host.memory_bandwidth / slower, cores=cores)
        return StepTimes(replace(cluster, host=host, host_link=_slower(cluster.host_link, slower)), copies=times)
    slow = replace(
        cluster,
        intra_node=_slower(cluster.intra_node, slower),
        inter_node=_slower(cluster.inter_node, slower),
        inter_leaf=None if cluster.inter_leaf is None else _slower(cluster.inter_leaf, slower),
    )
    return StepTimes(cluster, dict.fromkeys(_AXES[kind], slow), copies=None if kind == "splits" else times)


def _slower(link: LinkSpec, slower: float) -> LinkSpec:
    return replace(link, bandwidth=link.bandwidth / slower, latency_s=link.latency_s * slower)
