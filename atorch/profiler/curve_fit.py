"""Fits constants of a cluster to five or more measured step times.

Every constant has a log-normal prior. The fit maximises the posterior of the constants under the prior and the runs,
whose errors are log-normal, too (maximum a posteriori, by least squares). So few runs change few constants, and only as
far as needed. Large errors of a run count linearly, not by their square: Huber 1964, "Robust Estimation of a Location
Parameter".
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atorch.cluster.file import with_source
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, step_seconds
from atorch.cost.uncertainty import KINDS, OWN, Uncertainty

SPREAD: Mapping[str, float] = {
    # Prior standard deviations of the constants' logarithms.
    "device.efficiency.matmul": 0.2,
    "device.efficiency.attention": 0.1,
    "device.efficiency.traffic": 0.25,
    "device.launch_s": 0.3,
    "intra_node.efficiency": 0.2,
    "intra_node.latency_s": 0.5,
    "inter_node.efficiency": 0.4,
    "inter_node.latency_s": 0.5,
}
SHARES = ("efficiency", "matmul", "attention", "traffic")  # limited to at most 1
NOISE = 0.08  # standard deviation of a run's logarithm that no constant explains
MOVED = 0.01  # relative change from which a constant gets the runs as its source

FloatVector = npt.NDArray[np.float64]


class TimedRun(NamedTuple):
    """A measured step: its cost, its cluster and its measured seconds."""

    name: str
    cost: Cost
    cluster: ClusterSpec
    seconds: float

    def estimate(self, factors: Mapping[str, float]) -> float:
        """Estimated seconds, with the cluster's constants multiplied by `factors`."""
        return step_seconds(self.cost, with_constants(self.cluster, factors))


@dataclass(frozen=True)
class Calibrated:
    cluster: ClusterSpec
    factors: Mapping[str, float]  # by which constants changed, by place in the file
    error_before: float  # median of |estimate / measured − 1|
    error_after: float
    band_before: tuple[float, float]  # interval of four of five steps over the estimate, the widest of all runs
    band_after: tuple[float, float]


def calibrated(cluster: ClusterSpec, runs: Sequence[TimedRun]) -> Calibrated:
    """The cluster with its most probable constants given the runs; changed ones name the runs as their source."""
    factors = {name: factor for name, factor in fitted(runs).items() if abs(factor - 1) > MOVED}
    before, after = _error(runs, {}), _error(runs, factors)
    note = f"fitted by atorch calibrate on {len(runs)} runs, whose median error fell from {before:.0%} to {after:.0%}"
    sources = cluster.sources
    for name, factor in factors.items():
        sources = with_source(sources, name, f"{note}; × {factor:.3g} of: {cluster.source_of(name)}")
    sources = with_source(sources, "uncertainty", f"{note}; what these runs have of each kind of work is known by them")
    covariance = _posterior_covariance(runs, factors)
    result = replace(with_constants(cluster, factors), uncertainty=covariance, sources=sources)
    bands = (_widest(cluster, runs), _widest(result, runs))
    return Calibrated(result, factors, before, after, *bands)


def _widest(cluster: ClusterSpec, runs: Sequence[TimedRun]) -> tuple[float, float]:
    """The widest band over all runs, relative to the estimate."""
    bands = []
    for run in runs:
        uncertainty = Uncertainty(replace(run.cluster, uncertainty=cluster.uncertainty))
        bands.append(uncertainty.band(1.0, uncertainty.shares(run.cost)))
    return max(bands, key=lambda band: band[1] / band[0])


def _posterior_covariance(runs: Sequence[TimedRun], factors: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The posterior covariance of errors by kind of work, once constants are fitted to runs.

    The prior is the covariance of published runs. Every run observes the sum of errors weighted by its shares, with the
    residual of the fit as noise. The result is the posterior of a linear model with normal errors.
    """
    shares, prior, errors = [], np.zeros((len(KINDS), len(KINDS))), []
    for run in runs:
        uncertainty = Uncertainty(with_constants(run.cluster, factors))
        shares.append(uncertainty.shares(run.cost))
        prior = np.asarray(uncertainty.covariance)
        errors.append(np.log(run.seconds / run.estimate(factors)))
    noise = max(OWN, float(np.sqrt(np.mean(np.square(errors)))))
    weights = np.asarray(shares)
    observed = weights @ prior @ weights.T + noise**2 * np.eye(len(runs))
    # A linear Gaussian model: what the runs say about sums of errors shrinks the covariance of the single errors.
    posterior = prior - prior @ weights.T @ np.linalg.solve(observed, weights @ prior)
    return {
        kind: {other: float(value) for other, value in zip(KINDS, row, strict=True)}
        for kind, row in zip(KINDS, (posterior + posterior.T) / 2, strict=True)
    }


def _error(runs: Sequence[TimedRun], factors: Mapping[str, float]) -> float:
    return statistics.median(abs(run.estimate(factors) / run.seconds - 1) for run in runs)


def fitted(
    runs: Sequence[TimedRun], spread: Mapping[str, float] = SPREAD, noise: float | Sequence[float] = NOISE
) -> dict[str, float]:
    """The most probable factors on constants given the runs, by place in the cluster; empty without runs."""
    if not runs:
        return {}
    from scipy.optimize import least_squares

    names, widths = list(spread), np.asarray(list(spread.values()))
    measured = np.log([run.seconds for run in runs])

    def residuals(offsets: FloatVector) -> FloatVector:
        factors = dict(zip(names, np.exp(offsets), strict=True))
        estimated = np.log([run.estimate(factors) for run in runs])
        return np.concatenate([_robust((estimated - measured) / np.asarray(noise)), offsets / widths])

    offsets = least_squares(residuals, np.zeros(len(names))).x
    return dict(zip(names, np.exp(offsets).tolist(), strict=True))


def _robust(errors: FloatVector) -> FloatVector:
    """Square roots of a pseudo-Huber loss: quadratic for small errors, linear (twice the size) for large ones."""
    return np.asarray(np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1)))


def with_constants(cluster: ClusterSpec, factors: Mapping[str, float]) -> ClusterSpec:
    """`cluster` with figures multiplied, by place; shares stay at most 1."""
    for name, factor in factors.items():
        cluster = _scaled(cluster, name.split("."), factor)
    return cluster


def _scaled(spec: Any, path: Sequence[str], factor: float) -> Any:
    name, rest = path[0], path[1:]
    value = getattr(spec, name)
    if rest:
        return replace(spec, **{name: _scaled(value, rest, factor)})
    return replace(spec, **{name: min(1.0, value * factor) if name in SHARES else value * factor})
