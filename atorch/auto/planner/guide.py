"""Predictions for compositions that were not run: a correction of the estimates, learnt from measurements.

What a method does to a step's time is close to a factor: compiling, a lower precision or recomputation each multiply
it by about the same number whatever they are combined with. So the logarithm of measured over estimated is modelled as
a sum: one unknown for the machine, one for each method, a smaller one for each pair, and a rest. With normal priors
this is a Gaussian process over sets of methods (Rasmussen and Williams 2006, chapter 2), and what is best run next is
what promises the largest expected improvement (Jones, Schonlau and Welch 1998).

What earlier searches on the machine measured enters as further observations of the same process. Each unknown has a
part that all jobs share and a part of each job's own; all times of one search share an unknown for how fast the machine
then was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from atorch.auto.planner.calibration import Past
from atorch.auto.planner.estimate import Scored
from atorch.auto.strategy import Strategy

# Standard deviations of the logarithm.
MACHINE, METHOD, PAIR, REST, NOISE = 1.0, 0.5, 0.15, 0.03, 0.03
DRIFT = 0.15  # of the machine's speed, from one search to the next
SHARED = 0.6  # of the variance of an unknown, what jobs have in common


@dataclass
class Guide:
    """Predicts the seconds of every composition from the estimates and what was measured so far."""

    candidates: Sequence[Scored]
    past: Past = Past()
    _measured: dict[int, float] = field(default_factory=dict)  # index → seconds
    _failed: list[int] = field(default_factory=list)
    _known: dict[str, Any] = field(default_factory=dict)  # what was worked out since the last measurement

    def __post_init__(self) -> None:
        self._tokens = [tokens_of(each.strategy) for each in self.candidates]
        self._everywhere = frozenset.intersection(*self._tokens)
        self._log_estimates = np.log([max(each.estimate.step_s, 1e-12) for each in self.candidates])
        self._features = _features([*self._tokens, *(each.methods for each in self.past.observations)])
        own_job = [self.past.job] * len(self._tokens)
        self._jobs = _numbered([*own_job, *(each.job for each in self.past.observations)])
        self._searches = _numbered([*([""] * len(own_job)), *(each.search for each in self.past.observations)])
        place = {tokens: index for index, tokens in enumerate(self._tokens)}
        earlier = self.past.observations
        own = [place.get(each.methods) if each.job == self.past.job else None for each in earlier]
        # What ran in this very job tells its seconds; of others it is known how far they were from their estimates.
        self._told = [
            math.log(each.step_s) - (math.log(each.estimate_s) if index is None else self._log_estimates[index])
            for each, index in zip(earlier, own, strict=True)
        ]

    def _covariances(self, rows: npt.NDArray[np.int_], columns: npt.NDArray[np.int_]) -> npt.NDArray[np.float64]:
        """Covariances of some candidates, or, behind these, earlier observations, with some others.

        Only what was seen is ever a column: each with each would grow with the square of the candidates.
        """
        first, second = self._features[rows], self._features[columns]
        shared = first @ second.T
        pairs = shared * (shared - 1) / 2
        is_same = (shared == first.sum(axis=1)[:, None]) & (shared == second.sum(axis=1))
        unknowns = MACHINE**2 - DRIFT**2 + METHOD**2 * shared + PAIR**2 * pairs + REST**2 * is_same
        is_own = self._jobs[rows][:, None] == self._jobs[columns]
        is_now = self._searches[rows][:, None] == self._searches[columns]
        return np.asarray(unknowns * np.where(is_own, 1.0, SHARED) + DRIFT**2 * is_now)

    def _variances(self) -> npt.NDArray[np.float64]:
        """Variances of the candidates, before anything was seen."""
        held = self._features[: len(self._tokens)].sum(axis=1)
        return np.asarray(MACHINE**2 + METHOD**2 * held + PAIR**2 * held * (held - 1) / 2 + REST**2)

    def tell(self, index: int, seconds: float) -> None:
        self._measured[index] = seconds
        self._known.clear()

    def tell_failed(self, index: int) -> None:
        self._measured.pop(index, None)
        self._failed.append(index)
        self._known.clear()

    def convicted(self) -> list[str]:
        """Methods, in their settings, that alone can be why at least two candidates failed: all else in them ran."""
        suspects = [self._suspects(index) for index in self._failed]
        counts = Counter(token for tokens in suspects if len(tokens) == 1 for token in tokens)
        return sorted(token for token, count in counts.items() if count > 1)

    def _suspects(self, index: int) -> frozenset[str]:
        """Methods of a failed candidate that no measured one has, and not all have."""
        return self._tokens[index].difference(self._everywhere, *(self._tokens[i] for i in self._measured))

    def predictions(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The mean and standard deviation of the logarithm of every candidate's seconds."""
        if "predictions" not in self._known:
            self._known["predictions"] = self._predicted()
        found: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] = self._known["predictions"]
        return found

    def _predicted(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        count = len(self._tokens)
        prior = self._variances()
        seen = np.array([*self._measured, *range(count, len(self._features))], dtype=int)
        if not len(seen):
            return self._log_estimates, np.sqrt(prior)
        residual = [math.log(seconds) - self._log_estimates[index] for index, seconds in self._measured.items()]
        residual += self._told
        across = self._covariances(np.arange(count), seen)
        solved = np.linalg.solve(self._covariances(seen, seen) + NOISE**2 * np.eye(len(seen)), across.T)
        mean = self._log_estimates + solved.T @ residual
        variance = np.maximum(prior - np.sum(across * solved.T, axis=1), 0.0)
        return mean, np.sqrt(variance)

    def gains(self) -> npt.NDArray[np.float64]:
        """The expected improvement of every candidate over the best measured one, as a fraction of its seconds.

        Before anything was measured the order of what is predicted decides. What may be the reason of failures counts
        half, for each of them.
        """
        if "gains" not in self._known:
            self._known["gains"] = self._gained()
        found: npt.NDArray[np.float64] = self._known["gains"]
        return found

    def _gained(self) -> npt.NDArray[np.float64]:
        mean, deviation = self.predictions()
        suspects = [self._suspects(index) for index in self._failed]
        trust = np.array([0.5 ** sum(not each.isdisjoint(tokens) for each in suspects) for tokens in self._tokens])
        if not self._measured:
            return np.asarray(trust * np.exp(mean.min() - mean))
        best = math.log(min(self._measured.values()))
        gains = np.zeros(len(mean))
        for index in range(len(mean)):
            if index not in self._measured and deviation[index] > 0:
                gains[index] = _expected_gain(best - mean[index], deviation[index])
        return trust * gains


def _features(tokens: Sequence[frozenset[str]]) -> npt.NDArray[np.float64]:
    """Features: a row a composition, a column a method in its settings."""
    vocabulary = {token: column for column, token in enumerate(sorted(set().union(*tokens)))}
    features = np.zeros((len(tokens), len(vocabulary)))
    for row, held in enumerate(tokens):
        features[row, [vocabulary[token] for token in held]] = 1.0
    return features


def _numbered(values: Sequence[str]) -> npt.NDArray[np.int_]:
    """Equal numbers for equal values."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values])


def _expected_gain(margin: float, deviation: float) -> float:
    """E[max(0, x)] of a normal x with this mean and standard deviation."""
    z = margin / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return margin * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density


def tokens_of(strategy: Strategy) -> frozenset[str]:
    """Tokens of a composition: each method in its settings."""
    return frozenset(repr(each) for each in strategy)


def has(strategy: Strategy, token: str) -> bool:
    return token in tokens_of(strategy)
