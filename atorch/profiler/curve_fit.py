"""Constants of a cluster fitted to measured step times, five and more.

Every constant is known before anything is measured, within a factor: that is its prior. A fit is the most probable set
of constants under the prior and the runs, with log-normal errors of both (maximum a posteriori, by Gauss-Newton), so
that few runs move few constants, and only as far as they must. A run that nothing explains counts as far as it is off,
not by the square of it: Huber 1964, "Robust Estimation of a Location Parameter".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atorch.cluster.file import with_source
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, step_seconds
from atorch.cost.uncertainty import KINDS, OWN, Uncertainty

SPREAD: Mapping[str, float] = {
    # The standard deviation of a constant's logarithm before anything is measured.
    "device.efficiency.matmul": 0.2,
    "device.efficiency.attention": 0.1,
    "device.efficiency.traffic": 0.25,
    "device.launch_s": 0.3,
    "intra_node.efficiency": 0.2,
    "intra_node.latency_s": 0.5,
    "inter_node.efficiency": 0.4,
    "inter_node.latency_s": 0.5,
}
SHARES = ("efficiency", "matmul", "attention", "traffic")  # which stay at most 1
NOISE = 0.08  # of a run's logarithm: what no constant explains
MOVED = 0.01  # what a constant must change by to have the runs as its source
ROUNDS = 8

FloatVector = npt.NDArray[np.float64]


class TimedRun(NamedTuple):
    """A measured step: what it is by arithmetic, the devices that it had, and the seconds that it took."""

    name: str
    cost: Cost
    cluster: ClusterSpec
    seconds: float

    def estimate(self, factors: Mapping[str, float]) -> float:
        """Seconds by arithmetic, with constants multiplied."""
        return step_seconds(self.cost, with_constants(self.cluster, factors))


@dataclass(frozen=True)
class Calibrated:
    """A cluster as runs have it."""

    cluster: ClusterSpec
    factors: Mapping[str, float]  # by which constants changed, by their place
    error_before: float  # the median of |estimate / measured − 1|
    error_after: float
    band_before: tuple[float, float]  # what four of five such steps take, times the estimate: the widest of the runs
    band_after: tuple[float, float]


def calibrated(cluster: ClusterSpec, runs: Sequence[TimedRun]) -> Calibrated:
    """The cluster with the constants that runs on it make most probable; those that changed say so in their source."""
    factors = {name: factor for name, factor in fitted(runs).items() if abs(factor - 1) > MOVED}
    before, after = _error(runs, {}), _error(runs, factors)
    said = f"fitted by atorch calibrate on {len(runs)} runs, whose median error fell from {before:.0%} to {after:.0%}"
    sources = cluster.sources
    for name, factor in factors.items():
        sources = with_source(sources, name, f"{said}; × {factor:.3g} of: {cluster.source_of(name)}")
    sources = with_source(sources, "uncertainty", f"{said}; what these runs have of each kind of work is known by them")
    known = replace(with_constants(cluster, factors), uncertainty=_left_unknown(runs, factors), sources=sources)
    bands = (_widest(cluster, runs), _widest(known, runs))
    return Calibrated(known, factors, before, after, *bands)


def _widest(cluster: ClusterSpec, runs: Sequence[TimedRun]) -> tuple[float, float]:
    """The widest band that a step like one of the runs has, of an estimate of 1."""
    found = []
    for run in runs:
        uncertainty = Uncertainty(replace(run.cluster, uncertainty=cluster.uncertainty))
        found.append(uncertainty.band(1.0, uncertainty.shares(run.cost)))
    return max(found, key=lambda band: band[1] / band[0])


def _left_unknown(runs: Sequence[TimedRun], factors: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The covariance of errors by kind of work once constants are fitted to runs.

    What is wrong of each kind of work was known as published runs tell it; every run tells the sum over kinds of its
    share of each, as well as the fit explains runs (the posterior of a linear model with normal errors).
    """
    shares, before, errors = [], np.zeros((len(KINDS), len(KINDS))), []
    for run in runs:
        uncertainty = Uncertainty(with_constants(run.cluster, factors))
        shares.append(uncertainty.shares(run.cost))
        before = np.asarray(uncertainty.covariance)
        errors.append(np.log(run.seconds / run.estimate(factors)))
    noise = max(OWN, float(np.sqrt(np.mean(np.square(errors)))))
    told = np.asarray(shares)
    seen = told @ before @ told.T + noise**2 * np.eye(len(runs))
    left = before - before @ told.T @ np.linalg.solve(seen, told @ before)
    return {
        kind: {other: float(value) for other, value in zip(KINDS, row, strict=True)}
        for kind, row in zip(KINDS, (left + left.T) / 2, strict=True)
    }


def _error(runs: Sequence[TimedRun], factors: Mapping[str, float]) -> float:
    return statistics.median(abs(run.estimate(factors) / run.seconds - 1) for run in runs)


def fitted(
    runs: Sequence[TimedRun], spread: Mapping[str, float] = SPREAD, noise: float | Sequence[float] = NOISE
) -> dict[str, float]:
    """The factors on constants, by their place in the cluster, that the runs make most probable; none of no runs."""
    if not runs:
        return {}
    names, widths = list(spread), np.asarray(list(spread.values()))
    measured = np.log([run.seconds for run in runs])

    def residuals(offsets: FloatVector) -> FloatVector:
        factors = dict(zip(names, np.exp(offsets), strict=True))
        estimated = np.log([run.estimate(factors) for run in runs])
        return np.concatenate([_robust((estimated - measured) / np.asarray(noise)), offsets / widths])

    return dict(zip(names, np.exp(gauss_newton(residuals, len(names))).tolist(), strict=True))


def _robust(errors: FloatVector) -> FloatVector:
    """The roots of a pseudo-Huber loss: as the square of small errors, as twice the size of large ones."""
    return np.asarray(np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1)))


def gauss_newton(residuals: Callable[[FloatVector], FloatVector], size: int) -> FloatVector:
    """The offsets, from zero, that minimise the sum of squared residuals; steps that make it worse are halved."""
    offsets, step = np.zeros(size), 1e-3
    current = residuals(offsets)
    for _ in range(ROUNDS):
        jacobian = np.stack([(residuals(offsets + step * unit) - current) / step for unit in np.eye(size)], axis=1)
        move = np.linalg.lstsq(jacobian, -current, rcond=None)[0]
        for _ in range(6):
            proposed = residuals(offsets + move)
            if proposed @ proposed < current @ current:
                offsets, current = offsets + move, proposed
                break
            move = move / 2
        else:
            break
    return offsets


def with_constants(cluster: ClusterSpec, factors: Mapping[str, float]) -> ClusterSpec:
    """`cluster` with figures multiplied, by their place; shares stay at most 1."""
    for name, factor in factors.items():
        cluster = _scaled(cluster, name.split("."), factor)
    return cluster


def _scaled(spec: Any, path: Sequence[str], factor: float) -> Any:
    name, rest = path[0], path[1:]
    value = getattr(spec, name)
    if rest:
        return replace(spec, **{name: _scaled(value, rest, factor)})
    return replace(spec, **{name: min(1.0, value * factor) if name in SHARES else value * factor})
