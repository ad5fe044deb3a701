"""Measures dry runs: steps of a trial until they are steady, then enough of them for a median."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from atorch.auto.context import Context
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, described, forget_compiled
from atorch.auto.planner.dry_runs.trial import Feed, Trial
from atorch.auto.planner.estimate.ranking import compiles
from atorch.auto.planner.plan import Measurement, Why
from atorch.auto.strategy import Strategy

WARM_UP, STEADY = 6, 0.1  # at most this many steps, until two differ by less than this fraction
TIMEOUT_S = 300.0  # seconds that a process waits for its peers in a dry run
HOPELESS = 2.0  # multiple of the best step from which on a step need not be measured well


@dataclass(frozen=True)
class DryRuns:
    """Runs compositions on this job's own processes."""

    ctx: Context
    crew: Coordinator
    feed: Feed

    def refusal(self, strategy: Strategy) -> str | None:
        """The error of a check of the strategy on some rank, or None."""
        for check in (strategy.check_at_work, strategy.check_optimizer):
            reasons: list[str | None] = self.crew.gather(_why_not(check, self.ctx))
            if any(reasons):
                return next(reason for reason in reasons if reason)
        return None

    def trial(self, strategy: Strategy, limit_s: float) -> Trial:
        """A copy of the model under the strategy."""
        if compiles(strategy):
            forget_compiled()  # before the trial, not after: code of the winner can be used when it is applied
        return Trial(self.ctx, strategy, self.crew, self.feed, TIMEOUT_S, limit_s=limit_s)


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
    steps: list[float] = []
    for _ in range(WARM_UP):
        seconds = trial.step()
        if seconds is None:
            return failure_of(trial)
        is_steady = bool(steps) and abs(steps[-1] / seconds - 1) < STEADY
        steps = [*steps, seconds] if is_steady else [seconds]
        if is_steady or trial.elapsed_s + seconds > share_s:
            break
    is_hopeless = best_s is not None and steps[-1] > HOPELESS * best_s
    while len(steps) < _enough(steps[-1]) and not is_hopeless and trial.elapsed_s + steps[-1] <= share_s:
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


def _enough(step_s: float) -> int:
    """Steps for a median: half a second's worth, 3 to 20."""
    return min(20, max(3, int(0.5 / max(step_s, 1e-6))))


def failure_of(trial: Trial) -> Failure:
    return Failure("time" if trial.is_overdue else "failed", str(trial.failure))
