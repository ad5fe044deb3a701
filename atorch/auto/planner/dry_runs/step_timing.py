"""Measures dry runs: steps of a trial until they are steady, then enough of them for a median; the best few in turns.

A machine's speed drifts more within minutes than compositions differ. So in the final comparison the best few and the
baseline take steps in turns, and a disturbance affects all. A composition must be faster than the baseline by more than
the noise of these turns; among equally fast ones, the simplest is chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atorch.auto.context import Context
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, described, forget_compiled
from atorch.auto.planner.dry_runs.trial import BatchCache, Trial
from atorch.auto.planner.plan import Measurement, Why
from atorch.auto.planner.ranking import compiles
from atorch.auto.strategy import Strategy

WARM_UP, STEADY = 6, 0.1  # at most this many steps, until two differ by less than this fraction
CLOSE = 0.03  # of two steps that differ by less, no third is taken
TIMEOUT_S = 300.0  # seconds that a process waits for its peers in a dry run
HOPELESS = 2.0  # multiple of the best step from which on a step need not be measured well


@dataclass(frozen=True)
class DryRuns:
    """Runs compositions on this job's own processes."""

    ctx: Context
    coordinator: Coordinator
    feed: BatchCache

    def refusal(self, strategy: Strategy) -> str | None:
        """The error of a check of the strategy on some rank, or None."""
        for check in (strategy.check_at_work, strategy.check_optimizer):
            reasons: list[str | None] = self.coordinator.gather(_why_not(check, self.ctx))
            if any(reasons):
                return next(reason for reason in reasons if reason)
        return None

    def trial(self, strategy: Strategy, limit_s: float) -> Trial:
        """A copy of the model under the strategy."""
        if compiles(strategy):
            forget_compiled()  # before the trial, not after: code of the winner can be used when it is applied
        return Trial(self.ctx, strategy, self.coordinator, self.feed, TIMEOUT_S, limit_s=limit_s)


def _why_not(check: Callable[[Context], None], ctx: Context) -> str | None:
    try:
        check(ctx)
    except Exception as error:  # users' methods, models and optimizers may raise anything
        return described(error)
    return None


@dataclass(frozen=True)
class Failure:
    """A dry run without a measurement, and the reason."""

    why: Why
    reason: str


def measure(trial: Trial, share_s: float, best_s: float | None) -> Measurement | Failure:
    """Run a trial's steps until two are steady, then enough for a median; returns the median, or the failure.

    If `share_s` is over, since the start took longer than expected, a single step counts as steady.
    """
    if not trial.start():
        return failure_of(trial)
    steps = [trial.first_step_s]
    for _ in range(WARM_UP - 1):
        seconds = trial.step()
        if seconds is None:
            return failure_of(trial)
        is_steady = abs(steps[-1] / seconds - 1) < STEADY
        steps = [*steps, seconds] if is_steady else [seconds]
        if is_steady or trial.elapsed_s + seconds > share_s:
            break
    is_hopeless = best_s is not None and steps[-1] > HOPELESS * best_s
    while len(steps) < _enough(steps) and not is_hopeless and trial.elapsed_s + steps[-1] <= share_s:
        seconds = trial.step()
        if seconds is None:
            return failure_of(trial)
        steps.append(seconds)
    peak = trial.peak_bytes()
    if peak is None:
        return failure_of(trial)
    return Measurement(
        step_s=statistics.median(steps),
        num_steps=len(steps),
        startup_s=trial.startup_s,
        peak_bytes=peak,
        memory_kind=trial.memory_kind,
    )


def _enough(steps: Sequence[float]) -> int:
    """Steps for a median: half a second's worth, at most 20 and at least 3, or 2 that are close."""
    least = 2 if max(steps) < (1 + CLOSE) * min(steps) else 3
    return min(20, max(least, int(0.5 / max(steps[-1], 1e-6))))


def failure_of(trial: Trial) -> Failure:
    return Failure("time" if trial.is_overdue else "failed", str(trial.failure))


TIE = 0.01  # share of a step: smaller differences are ties
SURE = 2.0  # standard errors of the median that a gain must exceed
MIN_TURNS, MAX_TURNS = 5, 60
TURNS_S = 2.0  # seconds of steps for each contender, if steps are quick
NOISY, LONGER = 0.03, 4  # noise of a verdict above which the turns are extended, by up to this factor
WARM_UP_TURNS = 2
LOOKS = (10, 20, 40)  # turns after which clearly slower contenders leave


@dataclass(frozen=True)
class Verdict:
    """The result of one contender: the ratio of its seconds to the baseline's in the same turn."""

    ratio: float  # the median
    noise: float  # the standard error of its logarithm

    @classmethod
    def of(cls, seconds: Sequence[float], baseline: Sequence[float]) -> Verdict:
        logs = [math.log(mine / theirs) for mine, theirs in zip(seconds, baseline, strict=True)]
        middle = statistics.median(logs)
        spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)  # σ, of normal ones
        return cls(math.exp(middle), 1.2533 * spread / math.sqrt(len(logs)))

    @property
    def is_faster(self) -> bool:
        """True if it is faster by more than a tie and the noise."""
        return math.log(self.ratio) + SURE * self.noise < -TIE


def num_turns(step_s: float) -> int:
    """The number of turns for a verdict on steps of this length."""
    return min(MAX_TURNS, max(MIN_TURNS + 2, int(TURNS_S / max(step_s, 1e-6))))


def seconds_needed(startups: Sequence[float], steps: Sequence[float]) -> float:
    return sum(startups) + (WARM_UP_TURNS + num_turns(min(steps, default=1.0))) * sum(steps)


def in_turns(
    trials: Mapping[int, Trial],
    turns: int,
    goes_on: Callable[[float], bool],
    failed: Callable[[int], None],
    baseline: int | None = None,
) -> dict[int, list[float]]:
    """Seconds of every trial by turn, after warm-up turns.

    `failed` is called with a trial that fails, which is then left out. A trial that is clearly slower than the fastest
    stops and keeps its seconds; `baseline` continues as the reference, unless it is alone. Noise extends the turns.
    `goes_on` is called before each turn with its expected seconds; False ends the turns.
    """
    running, times = dict(trials), {index: list[float]() for index in trials}
    for turn in range(WARM_UP_TURNS + turns * LONGER):
        if turn - WARM_UP_TURNS in LOOKS:
            for index in _beaten({index: times[index] for index in running}):
                if index != baseline:
                    del running[index]
        if turn >= WARM_UP_TURNS + turns and _is_clear([times[index] for index in running]):
            break
        if len(running) < min(2, len(trials)) or not goes_on(sum(times[key][-1] for key in running if times[key])):
            break
        taken: dict[int, float] = {}
        for index in list(running) if turn % 2 else list(running)[::-1]:
            seconds = running[index].step()
            if seconds is None:
                failed(index)
                del running[index], times[index]
            else:
                taken[index] = seconds
        for index, seconds in taken.items():
            if index in times:
                times[index] = [*times[index], seconds] if turn >= WARM_UP_TURNS else []
    return times


def _beaten(times: Mapping[int, Sequence[float]]) -> set[int]:
    """Trials that are clearly slower than the fastest in the same turns."""
    if not times:
        return set()
    fastest = min(times, key=lambda index: statistics.median(times[index]))
    return {index for index in times if Verdict.of(times[fastest], times[index]).is_faster}


def _is_clear(times: Sequence[Sequence[float]]) -> bool:
    """True if the ratios of the trials have little noise."""
    return all(Verdict.of(seconds, times[0]).noise <= NOISY for seconds in times[1:])
