"""The surrogate model: estimates of compositions that were not run, and the run that is worth most.

What a method does to a step's time is close to a factor: compiling, a lower precision or recomputation each multiply
it by about the same number whatever they are combined with. What the estimate gets wrong about a kind of work is wrong
in all steps, as far as they have such work (`cost.uncertainty`). So the logarithm of measured over estimated is
modelled as a sum: one unknown for the machine, one for each kind of work, one for each method, a smaller one for each
pair, and a rest. With normal priors this is a Gaussian process over compositions (Rasmussen and Williams 2006, chapter
2). How wide all of them are follows from how far off the estimates turn out to be: Student's t process (Shah, Wilson
and Ghahramani 2014).

A run is worth what it is expected to improve on the choice (Jones, Schonlau and Welch 1998), where both have run, times
the chance that it runs.

What earlier searches on the machine measured enters as further observations of the same process. Each unknown has a
part that all jobs share and a part of each job's own; all times of one search share an unknown for how fast the machine
then was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from atorch.auto.planner.dry_run.calibration import Past
from atorch.auto.planner.estimate.score import Scored
from atorch.auto.strategy import Strategy
from atorch.cost.uncertainty import SIGMA

Vector = npt.NDArray[np.float64]


class Prior(NamedTuple):
    """Standard deviations of the logarithm, before anything was seen."""

    machine: float
    work: float  # times what is known of kinds of work
    method: float
    pair: float
    rest: float
    noise: float  # of one measurement


PRIORS: Mapping[str, Prior] = {
    "cuda": Prior(machine=0.2, work=1.0, method=0.07, pair=0.03, rest=0.03, noise=0.01),
    "cpu": Prior(machine=1.0, work=2.0, method=0.25, pair=0.1, rest=0.03, noise=0.05),  # whose estimates are rough
}
FREEDOM = 6.0  # degrees of it: as surely as if so many runs had told how wide the prior is
DRIFT = 0.15  # of the machine's speed, from one search to the next
SHARED = 0.6  # of the variance of an unknown, what jobs have in common
KIND_OF: Mapping[str, str] = {
    "matmul": "products", "traffic": "traffic", "optimizer": "traffic", "launch": "launches",
    "exposed_comm": "sharding", "bubble": "pipeline", "offload": "host", "extra": "common",
}  # fmt: skip
KINDS = tuple(SIGMA)

MEMORY = 0.1  # the standard deviation of log(bytes needed / estimated)
MUCH = 1.9  # times the bytes that are estimated: what a method needs that is not priced right
UNSURE = 1e-4  # chances are never nearer to 0 or 1
BLAMED, ALONE = 0.02, 0.02  # chances that a method, or a composition alone, is why something fails


@dataclass
class Surrogate:
    """Predicts the seconds of every composition from the estimates and what was measured so far."""

    candidates: Sequence[Scored]
    past: Past = Past()
    device_type: str = "cuda"
    memory_bytes: float = math.inf  # of a device
    _measured: dict[int, float] = field(default_factory=dict)  # index → seconds
    _failed: dict[int, bool] = field(default_factory=dict)  # index → whether memory ran out
    _known: dict[str, Any] = field(default_factory=dict)  # what was worked out since the last measurement

    def __post_init__(self) -> None:
        self.prior = PRIORS.get(self.device_type, PRIORS["cuda"])
        self._tokens = [tokens_of(each.strategy) for each in self.candidates]
        self._log_estimates = np.log([max(each.estimate.step_s, 1e-12) for each in self.candidates])
        self._features = _features([*self._tokens, *(each.methods for each in self.past.observations)])
        self._work = _shares(self.candidates, len(self.past.observations)) * self.prior.work
        names = [held | {getattr(each, "name", "") for each in one.strategy}
                 for held, one in zip(self._tokens, self.candidates, strict=True)]  # fmt: skip
        held = np.unique(_features(names) > 0, axis=1)  # what may be to blame: methods, in one setting or in all
        self._held = np.column_stack([held, np.zeros(len(held), dtype=bool)])
        needed = np.log([max(each.estimate.needed_bytes, 1.0) for each in self.candidates])[:, None]
        beyond = (needed + math.log(MUCH) * self._held - math.log(self.memory_bytes)) / MEMORY
        self._over = np.clip(np.vectorize(NormalDist().cdf)(beyond), UNSURE, 1 - UNSURE)  # by what needs much
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

    def _covariances(self, rows: npt.NDArray[np.int_], columns: npt.NDArray[np.int_]) -> Vector:
        """Of some candidates, or, behind these, earlier observations, with some others.

        Only what was seen is ever a column: each with each would grow with the square of the candidates.
        """
        first, second = self._features[rows], self._features[columns]
        shared = first @ second.T
        pairs = shared * (shared - 1) / 2
        is_same = (shared == first.sum(axis=1)[:, None]) & (shared == second.sum(axis=1))
        p = self.prior
        unknowns = p.machine**2 - min(DRIFT, p.machine) ** 2 + p.method**2 * shared + p.pair**2 * pairs
        unknowns = unknowns + p.rest**2 * is_same + self._work[rows] @ self._work[columns].T
        is_own = self._jobs[rows][:, None] == self._jobs[columns]
        is_now = self._searches[rows][:, None] == self._searches[columns]
        return np.asarray(unknowns * np.where(is_own, 1.0, SHARED) + min(DRIFT, p.machine) ** 2 * is_now)

    def _variances(self) -> Vector:
        """Of the candidates, before anything was seen."""
        p, held = self.prior, self._features[: len(self._tokens)].sum(axis=1)
        of_work = (self._work[: len(self._tokens)] ** 2).sum(axis=1)
        return np.asarray(p.machine**2 + of_work + p.method**2 * held + p.pair**2 * held * (held - 1) / 2 + p.rest**2)

    def tell(self, index: int, seconds: float) -> None:
        self._measured[index] = seconds
        self._known.clear()

    def tell_failed(self, index: int, *, of_memory: bool = False) -> None:
        """A candidate that does not run."""
        self._measured.pop(index, None)
        self._failed[index] = of_memory
        self._known.clear()

    def predictions(self) -> tuple[Vector, Vector]:
        """The mean and standard deviation of the logarithm of every candidate's seconds."""
        if "predictions" not in self._known:
            mean, solved, across, scale = self._posterior()
            variance = np.maximum(self._variances() - np.sum(across * solved.T, axis=1), 0.0)
            self._known["predictions"] = mean, scale * np.sqrt(variance)
        found: tuple[Vector, Vector] = self._known["predictions"]
        return found

    def _posterior(self) -> tuple[Vector, Vector, Vector, float]:
        """The means; what covariances with the seen leave of those among candidates; how wide all is."""
        if "posterior" not in self._known:
            self._known["posterior"] = self._solved()
        found: tuple[Vector, Vector, Vector, float] = self._known["posterior"]
        return found

    def _solved(self) -> tuple[Vector, Vector, Vector, float]:
        count = len(self._tokens)
        seen = np.array([*self._measured, *range(count, len(self._features))], dtype=int)
        residual = [math.log(seconds) - self._log_estimates[index] for index, seconds in self._measured.items()]
        residual += self._told
        across = self._covariances(np.arange(count), seen)
        if not len(seen):
            return self._log_estimates, across.T, across, 1.0
        both = np.column_stack([across.T, residual])
        solved = np.linalg.solve(self._covariances(seen, seen) + self.prior.noise**2 * np.eye(len(seen)), both)
        scale = math.sqrt((FREEDOM + float(np.dot(residual, solved[:, -1]))) / (FREEDOM + len(seen)))
        return self._log_estimates + across @ solved[:, -1], solved[:, :-1], across, scale

    def runs(self) -> Vector:
        """The probability that each candidate runs, by Bayes' rule.

        One method at most always fails, and one at most needs more memory than is estimated; else each composition has
        reasons of its own. A column stands for a method, the last for none.
        """
        if "runs" not in self._known:
            ran, oom = list(self._measured), [index for index, why in self._failed.items() if why]
            broken = [index for index, why in self._failed.items() if not why]
            held, over = self._held, self._over
            failing = np.where(held[broken], 1.0, ALONE).prod(axis=0) * np.where(held[oom], ALONE, 1.0).prod(axis=0)
            failing *= ~(held[ran].any(axis=0) | held.all(axis=0) & (np.arange(held.shape[1]) < held.shape[1] - 1))
            failing, short = _share(failing), _share(over[oom].prod(axis=0) * (1 - over[ran]).prod(axis=0))
            found = (1 - ALONE) * (1 - held @ failing) * (1 - over @ short)
            found[ran] = 1.0
            self._known["runs"] = found
        return np.asarray(self._known["runs"])

    def expected(self, starts: Vector) -> Vector:
        """The expected cost of choosing each, the logarithm of seconds; the least is the best choice.

        `starts` is what starting each takes, as a fraction of the training ahead. What did not run is chosen by trying
        whether it runs, and something else is where it does not: a search for the best alternative, where what is to
        be tried first is as good as its step and what a try costs, over the chance that it comes to something
        (Weitzman 1979).
        """
        mean, _ = self.predictions()
        doubt = self.apart(int(mean.argmin())) / 2
        doubt[list(self._measured)] = 0.0
        return np.asarray(mean + doubt + starts / np.maximum(self.runs(), 1e-6))

    def apart(self, index: int) -> Vector:
        """The variance of every candidate's difference from one."""
        _, solved, across, scale = self._posterior()
        with_it = self._covariances(np.arange(len(across)), np.array([index]))[:, 0] - across @ solved[:, index]
        variance = self._variances() - np.sum(across * solved.T, axis=1)
        return np.asarray(scale**2 * np.maximum(variance + variance[index] - 2 * with_it, 0.0))

    def gains(self, choice: int, again: Vector) -> Vector:
        """The expected gain of a run of each on the choice, once that ran, as a fraction of it.

        `again` is what starting each takes once it ran, as a fraction of the training ahead.
        """
        cost = self.predictions()[0] + again
        apart = np.sqrt(self.apart(choice))
        gains = self.runs() * [_expected_gain(cost[choice] - each, off) for each, off in zip(cost, apart, strict=True)]
        gains[[choice, *self._measured]] = 0.0
        return np.asarray(gains)


def _share(likelihood: Vector) -> Vector:
    """Of each method, that it is to blame, by how likely what was seen is then; the last stands for none."""
    weights = likelihood * np.append(np.full(len(likelihood) - 1, BLAMED), 1.0)
    return np.asarray(weights / max(weights.sum(), 1e-300))


def _shares(candidates: Sequence[Scored], num_more: int) -> Vector:
    """A row a composition: of each kind of work its share of the step, times how far off it may be."""
    shares = np.zeros((len(candidates) + num_more, len(KINDS)))
    for row, each in enumerate(candidates):
        for category, seconds in each.estimate.time.items():
            kind = KIND_OF[category]
            shares[row, KINDS.index(kind)] += SIGMA[kind] * seconds / each.estimate.step_s
    return shares


def _features(tokens: Sequence[frozenset[str]]) -> Vector:
    """What each has: a row a composition, a column a method in its settings."""
    vocabulary = {token: column for column, token in enumerate(sorted(set().union(*tokens)))}
    features = np.zeros((len(tokens), len(vocabulary)))
    for row, held in enumerate(tokens):
        features[row, [vocabulary[token] for token in held]] = 1.0
    return features


def _numbered(values: Sequence[str]) -> npt.NDArray[np.int_]:
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values])


def _expected_gain(margin: float, deviation: float) -> float:
    """E[max(0, x)] of a normal x with this mean and standard deviation."""
    if deviation <= 0 or math.isinf(margin):
        return max(0.0, margin)
    z = margin / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return margin * (1 + math.erf(z / math.sqrt(2))) / 2 + deviation * density


def tokens_of(strategy: Strategy) -> frozenset[str]:
    """Tokens of a composition: each method in its settings."""
    return frozenset(repr(each) for each in strategy)
