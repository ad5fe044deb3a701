"""Dry runs: of each steps until they are steady, and then enough for a median."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atorch.auto.context import Context
from atorch.auto.planner.dry_run.fault_barrier import Coordinator, described, forget_compiled
from atorch.auto.planner.dry_run.trial import Trial
from atorch.auto.planner.dry_run.trial_context import Feed
from atorch.auto.planner.dry_run.trial_order import compiles
from atorch.auto.planner.plan import Measurement, Why
from atorch.auto.strategy import Strategy

WARM_UP, STEADY = 6, 0.1  # at most this many steps, until two differ by less than this fraction
TIMEOUT_S = 300.0  # what a process waits for its peers in a dry run
HOPELESS = 2.0  # times the best: a step this slow need not be measured well


class OnTrial(Protocol):
    """The interface of a strategy that it runs: see `Trial`."""

    @property
    def memory_kind(self) -> str: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def is_overdue(self) -> bool: ...
    @property
    def startup_s(self) -> float: ...
    @property
    def elapsed_s(self) -> float: ...
    def start(self) -> bool: ...
    def step(self) -> float | None: ...
    def peak_bytes(self) -> float | None: ...
    def close(self) -> None: ...


class CompositionRunner(Protocol):
    """The interface that runs a search's compositions."""

    def refusal(self, strategy: Strategy) -> str | None:
        """Why a strategy is known not to be applicable; None where it is not."""

    def trial(self, strategy: Strategy, limit_s: float) -> OnTrial: ...


@dataclass(frozen=True)
class DryRuns:
    """Those on this job's own processes."""

    ctx: Context
    crew: Coordinator
    feed: Feed

    def refusal(self, strategy: Strategy) -> str | None:
        """The error of a check of the strategy on some rank, or None."""
        for check in (strategy.check_at_work, strategy.check_optimizer):
            reasons: list[str | None] = self.crew.gather(_why_not(check, self.ctx))
            if any(reasons):
                return next(each for each in reasons if each)
        return None

    def trial(self, strategy: Strategy, limit_s: float) -> Trial:
        """A copy of the model under the strategy."""
        if compiles(strategy):
            forget_compiled()  # before it, not after: what the winner compiled is there when it is applied
        return Trial(self.ctx, strategy, self.crew, self.feed, TIMEOUT_S, limit_s=limit_s)


def _why_not(check: Callable[[Context], None], ctx: Context) -> str | None:
    try:
        check(ctx)
    except Exception as error:  # users' methods, models and optimizers may raise anything
        return described(error)
    return None


@dataclass(frozen=True)
class Failure:
    """A dry run that came to nothing."""

    why: Why
    reason: str


def measure(trial: OnTrial, share_s: float, best_s: float | None) -> Measurement | Failure:
    """A trial's steps until two are steady, then enough for a median; or why it is rejected.

    Where `share_s` is over, as starting may take longer than it was expected to, one step is taken to be steady.
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


def failure_of(trial: OnTrial) -> Failure:
    return Failure("time" if trial.is_overdue else "failed", str(trial.failure))
