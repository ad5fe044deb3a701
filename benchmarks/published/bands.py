"""Errors of estimates by kind of work, fitted without the source in question, and the coverage of the resulting bands.

The fit yields the constants of `atorch/cost/uncertainty.py`, which explains them. Runs that stalled (`stalls.py`) are
not fitted, since no column predicts a stall; figures on bands include them. A band is for runs of a source that it was
not fitted on. Of n sources, quantiles are taken a little further out than 80 %, at 80 % · (1 + 1/n), since few sources
show little of the tails: split conformal prediction, Lei et al. 2018, "Distribution-Free Predictive Inference for
Regression", section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import ndtr

from atorch.cluster.spec import ClusterSpec
from atorch.cost.uncertainty import COMMON, COVERED, KINDS, OWN, Shares, Uncertainty
from benchmarks.published.leave_out import Source
from benchmarks.published.metrics import LEAST_IN_CELL, Result, cells, summary

Vector = npt.NDArray[np.float64]

FREEDOM = 4.0  # degrees of it, of Student's t
SAY = 5.0  # independent runs that one source counts as
BEFORE = 0.2  # prior sigma
WITHIN = 0.7  # standard deviation of the prior's logarithm
FIRST = 8  # runs of a cell, by estimate, whose order is scored
NEAR = 0.1  # a choice is among runs at most this much slower than the first of their cell
FAR = 1e3  # factor that puts a run behind all of those


class Run(NamedTuple):
    """A timed and estimated run, with its shares of kinds of work."""

    result: Result
    error: float  # the logarithm of measured over estimated
    shares: Shares


@dataclass(frozen=True)
class Bands:
    """Sigmas by kind of work, quantiles of errors over a run's sigma, and the side to which errors lean."""

    sigma: Mapping[str, float]
    low: float
    high: float
    lean: float

    def leaning(self, shares: Sequence[Shares]) -> Vector:
        """The median error of each run."""
        return np.asarray(self.lean * np.asarray(shares) @ np.asarray(list(self.sigma.values())))

    def spread(self, shares: Sequence[Shares]) -> Vector:
        """The sigma of each run."""
        return spread_of(np.asarray(list(self.sigma.values())), np.asarray(shares), OWN)

    def of_difference(self, one: Shares, other: Shares) -> float:
        """The sigma of the difference of two runs' errors, without each run's own part."""
        squares = [(self.sigma[kind] * (x - y)) ** 2 for kind, x, y in zip(KINDS, one, other, strict=True)]
        return math.sqrt(sum(squares))


def runs_of(source: Source) -> list[Run]:
    """Runs of a source that were timed and estimated."""
    uncertainties: dict[ClusterSpec, Uncertainty] = {}
    runs = []
    for case, result in source:
        if case.cost is None or case.cluster is None or not result.measured_s or not result.estimated_s:
            continue
        if case.cluster not in uncertainties:
            uncertainties[case.cluster] = Uncertainty(case.cluster)
        error = math.log(result.measured_s / result.estimated_s)
        runs.append(Run(result, error, uncertainties[case.cluster].shares(case.cost)))
    return runs


def fitted(sources: Sequence[Sequence[Run]]) -> Bands:
    """The sigmas that errors of some sources make most probable, and the quantiles that they then have."""
    sources = [found for runs in sources if (found := [run for run in runs if not run.result.stalled])]
    errors = np.asarray([run.error for runs in sources for run in runs])
    shares = np.asarray([run.shares for runs in sources for run in runs])
    says = np.asarray([1 / len(runs) for runs in sources for _ in runs])

    found = most_probable(errors, shares, says, own=OWN, before=[BEFORE] * len(KINDS))
    low, high = covering(errors / spread_of(found, shares, OWN), says, len(sources))
    (lean,) = _quantiles(errors / (shares @ found), says, (0.5,))
    sigma = dict(zip(KINDS, found.tolist(), strict=True))
    if not shares[:, KINDS.index("host")].any():  # no data: takes the largest other sigma
        sigma["host"] = max(value for kind, value in sigma.items() if kind != COMMON)
    return Bands(sigma, low, high, lean)


def most_probable(errors: Vector, shares: Vector, says: Vector, *, own: float, before: Sequence[float]) -> Vector:
    """The most probable sigmas of kinds, with runs weighted by `says`; `before` are the prior sigmas."""
    prior = np.log(before)

    def unlikely(logs: Vector) -> float:
        spread = spread_of(np.exp(logs), shares, own)
        off = np.log(spread) + (FREEDOM + 1) / 2 * np.log1p((errors / spread) ** 2 / FREEDOM)
        return float(SAY * says @ off + 0.5 * np.sum(((logs - prior) / WITHIN) ** 2))

    return np.asarray(np.exp(minimize(unlikely, prior, method="L-BFGS-B").x))


def spread_of(sigma: Vector, shares: Vector, own: float) -> Vector:
    """The sigma of each run, from its shares and the sigmas of kinds."""
    return np.asarray(np.sqrt(own**2 + shares**2 @ sigma**2))


def covering(values: Vector, says: Vector, num_sources: int) -> tuple[float, float]:
    """Quantiles between which `COVERED` of another source's values are expected."""
    outside = max(0.0, (1 - COVERED * (1 + 1 / num_sources)) / 2)
    low, high = _quantiles(values, says, (outside, 1 - outside))
    return low, high


def _quantiles(values: Vector, says: Vector, where: Sequence[float]) -> tuple[float, ...]:
    order = np.argsort(values)
    midpoints = (np.cumsum(says[order]) - says[order] / 2) / says.sum()
    return tuple(float(np.interp(share, midpoints, values[order])) for share in where)


class Pair(NamedTuple):
    """Two runs of a cell, of which the second is estimated to take longer."""

    slower: float  # the logarithm of how much
    spread: float  # sigma of the difference of their errors, without each run's own part
    is_faster: bool  # the second took less
    says: float

    def chance(self, own: float = OWN) -> float:
        """Probability that the second takes less."""
        return float(ndtr(-self.slower / math.hypot(self.spread, math.sqrt(2) * own)))


def pairs_of(runs: Sequence[Run], bands: Bands) -> list[Pair]:
    """Pairs among the first few of every cell; all pairs of a source together have weight 1."""
    by_name = {run.result.row_id: run for run in runs}
    pairs = []
    for cell in _ranked(runs):
        first = sorted(cell, key=_pace)[:FIRST]
        for one, other in combinations(first, 2):
            mine, yours = by_name[one.row_id], by_name[other.row_id]
            slower = math.log(_pace(other) / _pace(one))
            spread = bands.of_difference(mine.shares, yours.shares)
            pairs.append(Pair(slower, spread, slower + yours.error - mine.error < 0, 1.0))
    return [pair._replace(says=1 / len(pairs)) for pair in pairs]


def own_of(pairs: Sequence[Pair]) -> float:
    """The most probable sigma of each run's own error by the order of pairs, to 1 %."""

    def unlikely(own: float) -> float:
        chances = [(min(0.999, max(0.001, pair.chance(own))), pair) for pair in pairs]
        return -sum(pair.says * math.log(chance if pair.is_faster else 1 - chance) for chance, pair in chances)

    return min((number / 100 for number in range(1, 21)), key=unlikely)


def by_expected(runs: Sequence[Run], bands: Bands) -> list[Result]:
    """A source's results in the planner's order: runs about as fast as the first of their cell go by expected time."""
    expected = np.exp(bands.leaning([run.shares for run in runs]))
    factors = {run.result.row_id: float(factor) for run, factor in zip(runs, expected, strict=True)}
    reordered = []
    for cell in cells([run.result for run in runs]):
        ranked = [result for result in cell if result.is_ranked]
        limit = (1 + NEAR) * min(map(_pace, ranked), default=math.inf)
        for result in cell:
            factor = factors[result.row_id] if _pace(result) <= limit else FAR
            reordered.append(replace(result, estimated_s=factor * (result.estimated_s or 0.0)))
    return reordered


def _ranked(runs: Sequence[Run]) -> list[list[Result]]:
    ranked = [[result for result in cell if result.is_ranked] for cell in cells([run.result for run in runs])]
    return [cell for cell in ranked if len(cell) >= LEAST_IN_CELL]


def _pace(result: Result) -> float:
    assert result.estimated_s is not None  # every `Run` has an estimate
    return result.estimated_s / result.tokens


def report(sources: Mapping[str, Source]) -> dict[str, object]:
    """Print the coverage of each left-out source, the accuracy of chances, and the sigmas of all sources."""
    runs = {name: found for name, source in sources.items() if (found := runs_of(source))}
    of_others = {name: fitted([found for other, found in runs.items() if other != name]) for name in runs}
    lines = {name: _line([(mine, of_others[name])]) for name, mine in runs.items()}
    together = _line([(mine, of_others[name]) for name, mine in runs.items()])
    known = list(lines.values())
    lines |= {
        "all": together,
        "mean of sources": {key: sum(line[key] for line in known) / len(known) for key in together},
    }
    width = max(map(len, lines))
    print(f"\n{'80 % bands':<{width}} {'timed':>6} {'hold':>7} {'but stalled':>11} {'from':>6} {'to':>6}")
    for name, line in lines.items():
        held = f"{100 * line['held']:5.1f} % {100 * line['held_of_flowing']:9.1f} %"
        print(f"{name:<{width}} {line['timed']:6.0f} {held} {line['from']:6.2f} {line['to']:6.2f}")
    pairs = [pair for name, mine in runs.items() for pair in pairs_of(mine, of_others[name])]
    chances = _chances(pairs)
    for chance in chances:
        told, found = (f"{100 * chance[key]:.0f} %" for key in ("told", "found"))
        print(f"second of two said to be faster at {told} (mean of {chance['pairs']}): {found} are")
    chosen = [result for name, mine in runs.items() for result in by_expected(mine, of_others[name])]
    regrets = {key: value for key, value in summary(chosen).items() if key.startswith("regret")}
    print("by what is expected:", ", ".join(f"{key} {100 * (value or 0):.1f} %" for key, value in regrets.items()))
    bands = fitted(list(runs.values()))
    quantiles = {"LOW": bands.low, "HIGH": bands.high, "LEAN": bands.lean, "OWN": own_of(pairs)}
    print("atorch/cost/uncertainty.py, as these tables have it:")
    print("   ", ", ".join(f"{name} {value:.2f}" for name, value in [*bands.sigma.items(), *quantiles.items()]))
    return {"bands": lines, "chances": chances, "sigma": dict(bands.sigma), **quantiles, **regrets}


def _line(parts: Sequence[tuple[Sequence[Run], Bands]]) -> dict[str, float]:
    """Coverage of some runs by the bands of other sources."""
    spread = np.concatenate([bands.spread([run.shares for run in runs]) for runs, bands in parts])
    low, high = (
        np.concatenate([np.full(len(runs), quantile(bands)) for runs, bands in parts]) * spread
        for quantile in (lambda bands: bands.low, lambda bands: bands.high)
    )
    errors = np.asarray([run.error for runs, _ in parts for run in runs])
    flows = np.asarray([not run.result.stalled for runs, _ in parts for run in runs])
    held = (errors >= low) & (errors <= high)
    return {
        "timed": float(len(errors)),
        "held": float(held.mean()),
        "held_of_flowing": float(held[flows].mean()) if flows.any() else 0.0,
        "from": float(np.exp(low.mean())),
        "to": float(np.exp(high.mean())),
    }


def _chances(pairs: Sequence[Pair]) -> list[dict[str, float]]:
    """Predicted and measured chances of pairs, by the prediction."""
    found = []
    for least, most in pairwise((0.0, 0.05, 0.2, 0.35, 0.51)):
        inside = [pair for pair in pairs if least <= pair.chance() < most]
        says = sum(pair.says for pair in inside)
        if says:
            told = sum(pair.says * pair.chance() for pair in inside) / says
            right = sum(pair.says for pair in inside if pair.is_faster) / says
            found.append({"pairs": len(inside), "told": told, "found": right})
    return found
