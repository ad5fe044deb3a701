"""The surrogate model: predicts the seconds of compositions that were not run, and the value of running them.

A method multiplies a step's time by about the same factor in any combination: compilation, a lower precision and
recomputation all do. An error in the estimate of a kind of work affects all steps in proportion to such work
(`cost.uncertainty`). So the logarithm of measured over estimated seconds is modelled as a sum of unknowns. There is one
for the machine, for each kind of work and for each method, a smaller one for each pair, and a rest. With normal priors
this is a Gaussian process over compositions (Rasmussen and Williams 2006, chapter 2). The common scale of the priors
follows from the observed errors: Student's t process (Shah, Wilson and Ghahramani 2014).

The value of a run is its expected improvement on the choice (Jones, Schonlau and Welch 1998), times the probability
that it runs. The probability is taken under each possible cause of the failures so far.

Measurements of earlier searches on the machine are further observations of the same process. Each unknown has a part
that all jobs share and a part for each job. All times of one search share an unknown for the machine's speed at that
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from atorch.auto.planner.dry_runs.time_budget import Past
from atorch.auto.planner.plan import Scored
from atorch.auto.strategy import Strategy
from atorch.cost.uncertainty import SIGMA

Vector = npt.NDArray[np.float64]


class Prior(NamedTuple):
    """Standard deviations of the logarithm, before any observation."""

    machine: float
    work: float  # factor of the sigmas of kinds of work
    method: float
    pair: float
    rest: float
    noise: float  # of one measurement
    compiled: tuple[float, float] = (0.0, 0.0)  # mean and standard deviation of launches' error in compiled code


PRIORS: Mapping[str, Prior] = {
    "cuda": Prior(machine=0.2, work=1.0, method=0.07, pair=0.03, rest=0.03, noise=0.01),
    # Rough estimates. Compiled steps of 11 small models took e^1.0 (with a deviation of 0.8) times the estimate.
    "cpu": Prior(machine=1.0, work=2.0, method=0.25, pair=0.1, rest=0.03, noise=0.05, compiled=(1.0, 0.8)),
}
FREEDOM = 6.0  # degrees of freedom: the number of runs that the prior's scale counts as
DRIFT = 0.15  # standard deviation of the machine's speed between searches
SHARED = 0.6  # share of the variance of an unknown that jobs have in common
KIND_OF: Mapping[str, str] = {
    "matmul": "products", "traffic": "traffic", "optimizer": "traffic", "launch": "launches",
    "exposed_comm": "sharding", "bubble": "pipeline", "offload": "host", "extra": "common",
}  # fmt: skip
KINDS = tuple(SIGMA)

MEMORY = 0.1  # the standard deviation of log(bytes needed / estimated)
EXCESS = 1.9  # factor of needed bytes for a method whose estimate is wrong
UNSURE = 1e-4  # smallest distance of probabilities from 0 and 1
BLAMED, ALONE = 0.02, 0.02  # prior probabilities that a method, or a single composition, causes failures
AGAIN = 0.03  # probability that two failures have the same reason if not by the same cause


@dataclass
class Surrogate:
    """Predicts the seconds of every composition from the estimates and the measurements so far."""

    candidates: Sequence[Scored]
    past: Past = Past()
    device_type: str = "cuda"
    memory_bytes: float = math.inf  # of a device
    _measured: dict[int, float] = field(default_factory=dict)  # index → seconds
    _failed: dict[int, tuple[str, bool]] = field(default_factory=dict)  # index → the reason, whether memory ran out

    def __post_init__(self) -> None:
        self.prior = PRIORS.get(self.device_type, PRIORS["cuda"])
        self._tokens = [tokens_of(candidate.strategy) for candidate in self.candidates]
        compiled, (late, unsure) = compiled_launches(self.candidates), self.prior.compiled
        self._log_estimates = np.log([max(candidate.estimate.step_s, 1e-12) for candidate in self.candidates])
        self._log_estimates += late * compiled
        self._features = _features([*self._tokens, *(observed.methods for observed in self.past.observations)])
        # Launches of compiled steps are one more kind of work: their estimates are often wrong. Earlier runs have none.
        work = _shares(self.candidates, len(self.past.observations)) * self.prior.work
        self._work = np.column_stack([work, unsure * np.append(compiled, np.zeros(len(work) - len(compiled)))])
        names = [held | {getattr(method, "name", "") for method in candidate.strategy}
                 for held, candidate in zip(self._tokens, self.candidates, strict=True)]  # fmt: skip
        held = np.unique(_features(names) > 0, axis=1)  # possible causes: methods in one setting, or in all settings
        self._held = np.column_stack([held, np.zeros(len(held), dtype=bool)])
        needed = np.log([max(candidate.estimate.needed_bytes, 1.0) for candidate in self.candidates])[:, None]
        # Per candidate and cause, how far the memory is exceeded if the cause needs EXCESS times the estimate.
        beyond = (needed + math.log(EXCESS) * self._held - math.log(self.memory_bytes)) / MEMORY
        self._over = np.clip(np.vectorize(NormalDist().cdf)(beyond), UNSURE, 1 - UNSURE)  # out of memory, by cause
        own_job = [self.past.job] * len(self._tokens)
        self._jobs = _numbered([*own_job, *(observed.job for observed in self.past.observations)])
        self._searches = _numbered([*([""] * len(own_job)), *(observed.search for observed in self.past.observations)])
        index_of = {tokens: index for index, tokens in enumerate(self._tokens)}
        earlier = self.past.observations
        indices = [index_of.get(observed.methods) if observed.job == self.past.job else None for observed in earlier]
        # Runs of this job are compared with the present estimate, those of other jobs with their own estimates.
        self._past_residuals = [
            math.log(observed.step_s) - (math.log(observed.estimate_s) if index is None else self._log_estimates[index])
            for observed, index in zip(earlier, indices, strict=True)
        ]

    def _covariances(self, rows: npt.NDArray[np.int_], columns: npt.NDArray[np.int_]) -> Vector:
        """Prior covariances of rows with columns: indices of candidates, followed by earlier observations.

        Only observed ones are columns; all pairs would grow with the square of the candidates.
        """
        first, second = self._features[rows], self._features[columns]
        shared = first @ second.T  # the number of methods that both have
        pairs = shared * (shared - 1) / 2
        is_same = (shared == first.sum(axis=1)[:, None]) & (shared == second.sum(axis=1))
        p = self.prior
        # The machine's speed drifts between searches, so only runs of one search share all of its variance.
        unknowns = p.machine**2 - min(DRIFT, p.machine) ** 2 + p.method**2 * shared + p.pair**2 * pairs
        unknowns = unknowns + p.rest**2 * is_same + self._work[rows] @ self._work[columns].T
        is_own = self._jobs[rows][:, None] == self._jobs[columns]
        is_now = self._searches[rows][:, None] == self._searches[columns]
        return np.asarray(unknowns * np.where(is_own, 1.0, SHARED) + min(DRIFT, p.machine) ** 2 * is_now)

    def _variances(self) -> Vector:
        p, size = self.prior, self._features[: len(self._tokens)].sum(axis=1)
        of_work = (self._work[: len(self._tokens)] ** 2).sum(axis=1)
        return np.asarray(p.machine**2 + of_work + p.method**2 * size + p.pair**2 * size * (size - 1) / 2 + p.rest**2)

    def observe(self, index: int, seconds: float) -> None:
        self._measured[index] = seconds
        self._forget()

    def observe_failure(self, index: int, reason: str = "", *, of_memory: bool = False) -> None:
        self._measured.pop(index, None)
        self._failed[index] = reason, of_memory
        self._forget()

    def _forget(self) -> None:
        for name in ("predictions", "causes", "_posterior"):
            self.__dict__.pop(name, None)

    @cached_property
    def predictions(self) -> tuple[Vector, Vector]:
        """Means and standard deviations of the logarithms of all candidates' seconds."""
        mean, solved, across, scale = self._posterior
        variance = np.maximum(self._variances() - np.sum(across * solved.T, axis=1), 0.0)
        return mean, scale * np.sqrt(variance)

    @cached_property
    def _posterior(self) -> tuple[Vector, Vector, Vector, float]:
        """Posterior means, solved covariances with observations, prior covariances with them, and the common scale."""
        count = len(self._tokens)
        seen = np.array([*self._measured, *range(count, len(self._features))], dtype=int)
        residual = [math.log(seconds) - self._log_estimates[index] for index, seconds in self._measured.items()]
        residual += self._past_residuals
        across = self._covariances(np.arange(count), seen)
        if not len(seen):
            return self._log_estimates, across.T, across, 1.0
        both = np.column_stack([across.T, residual])  # solved together: covariances, and residuals in the last column
        solved = np.linalg.solve(self._covariances(seen, seen) + self.prior.noise**2 * np.eye(len(seen)), both)
        # Student's t: errors larger than the prior expects widen all predictions, smaller ones narrow them.
        scale = math.sqrt((FREEDOM + float(np.dot(residual, solved[:, -1]))) / (FREEDOM + len(seen)))
        return self._log_estimates + across @ solved[:, -1], solved[:, :-1], across, scale

    @property
    def runs(self) -> Vector:
        """The probability that each candidate runs."""
        shares, runs = self.causes
        return np.asarray(shares @ runs)

    @cached_property
    def causes(self) -> tuple[Vector, Vector]:
        """The probabilities of causes of failures, and of each candidate to run under each, by Bayes' rule.

        The model: at most one method always fails, and at most one needs more memory than estimated; other failures are
        independent, and rarely for the same reason. Every row is a method that fails, the last one is none.
        """
        ran, oom = list(self._measured), [index for index, (_, of_memory) in self._failed.items() if of_memory]
        held, over = self._held, self._over
        failing = np.where(held[oom], ALONE, 1.0).prod(axis=0)
        # A method in a strategy that ran does not always fail; nor does one that all have, unlike the last row, none.
        failing *= ~(held[ran].any(axis=0) | held.all(axis=0) & (np.arange(held.shape[1]) < held.shape[1] - 1))
        for reason in {reason for reason, of_memory in self._failed.values() if not of_memory}:
            rows = [index for index, failure in self._failed.items() if failure == (reason, False)]
            alone = (~held[rows]).sum(
                axis=0
            )  # failures that this cause leaves unexplained: one is by itself, then AGAIN
            failing *= ALONE**alone * AGAIN ** np.minimum(alone, len(rows) - 1)
        short = _share(over[oom].prod(axis=0) * (1 - over[ran]).prod(axis=0))
        runs = (1 - ALONE) * (1 - over @ short) * ~held.T
        runs[:, ran] = 1.0
        return _share(failing), runs

    def expected(self, starts: Vector, runs: Vector | None = None) -> Vector:
        """The expected cost of choosing each candidate, as a logarithm of seconds; the least is the best choice.

        `starts`: cost of each start, as a fraction of the training ahead. `runs`: probabilities to run. Choosing a
        candidate that has not run means to try it, and to choose another if it fails. The best first try has the least
        sum of its step's cost and the cost of a try over the probability of success (Weitzman 1979).
        """
        mean, _ = self.predictions
        doubt = self.variance_to(int(mean.argmin())) / 2
        doubt[list(self._measured)] = 0.0
        return np.asarray(mean + doubt + starts / np.maximum(self.runs if runs is None else runs, 1e-6))

    def variance_to(self, index: int) -> Vector:
        """The variance of the difference between every candidate and `index`."""
        _, solved, across, scale = self._posterior
        with_it = self._covariances(np.arange(len(across)), np.array([index]))[:, 0] - across @ solved[:, index]
        variance = self._variances() - np.sum(across * solved.T, axis=1)
        return np.asarray(scale**2 * np.maximum(variance + variance[index] - 2 * with_it, 0.0))

    def gains(self, choice: int, again: Vector, runs: Vector | None = None) -> Vector:
        """The expected gain of a run of each candidate over the choice, once that ran, as a fraction of its step.

        `again`: cost of another start after the run, as a fraction of the training ahead. `runs`: probabilities to run.
        """
        costs = self.predictions[0] + again
        spread = np.sqrt(self.variance_to(choice))
        margins = costs[choice] - costs
        runs = self.runs if runs is None else runs
        gains = runs * [_expected_gain(margin, s) for margin, s in zip(margins, spread, strict=True)]
        gains[[choice, *self._measured]] = 0.0
        return np.asarray(gains)


def _share(likelihood: Vector) -> Vector:
    """The posterior probability that each method is the cause, from the likelihoods; the last column is no method."""
    weights = likelihood * np.append(np.full(len(likelihood) - 1, BLAMED), 1.0)
    return np.asarray(weights / max(weights.sum(), 1e-300))


def _shares(candidates: Sequence[Scored], num_more: int) -> Vector:
    """Shares of kinds of work in each step times their sigmas, of shape (compositions, kinds)."""
    shares = np.zeros((len(candidates) + num_more, len(KINDS)))
    for row, candidate in enumerate(candidates):
        for category, seconds in candidate.estimate.time.items():
            kind = KIND_OF[category]
            shares[row, KINDS.index(kind)] += SIGMA[kind] * seconds / candidate.estimate.step_s
    return shares


def compiled_launches(candidates: Sequence[Scored]) -> Vector:
    """The share of a step in which a compiled composition is expected to launch operations; 0 for the others."""
    estimates = [candidate.estimate for candidate in candidates]
    compiled = [any(getattr(method, "name", "") == "compile" for method in item.strategy) for item in candidates]
    launches = [estimate.time.get("launch", 0.0) / (estimate.step_s or 1.0) for estimate in estimates]
    return np.asarray(np.array(compiled) * np.array(launches))


def _features(tokens: Sequence[frozenset[str]]) -> Vector:
    """1 where a composition has a token, of shape (compositions, tokens)."""
    vocabulary = {token: column for column, token in enumerate(sorted(set().union(*tokens)))}
    features = np.zeros((len(tokens), len(vocabulary)))
    for row, row_tokens in enumerate(tokens):
        features[row, [vocabulary[token] for token in row_tokens]] = 1.0
    return features


def _numbered(values: Sequence[str]) -> npt.NDArray[np.int_]:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values])


def _expected_gain(margin: float, deviation: float) -> float:
    """E[max(0, x)] for a normal x with mean `margin` and standard deviation `deviation`."""
    if deviation <= 0 or math.isinf(margin):
        return max(0.0, margin)
    z = margin / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return margin * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density


def tokens_of(strategy: Strategy) -> frozenset[str]:
    """The tokens of a composition: texts of its methods with their settings."""
    return frozenset(repr(method) for method in strategy)
