"""One dry run: steps until they are steady, and then enough for a median."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from atorch.auto.planner.plan import Measurement, Why
from atorch.auto.planner.trial import Trial
from atorch.units import format_seconds

WARM_UP, STEADY = 6, 0.1  # at most this many steps, until two differ by less than this fraction
HOPELESS = 2.0  # times the best: a step this slow need not be measured well


@dataclass(frozen=True)
class Failure:
    """A dry run that came to nothing."""

    why: Why
    reason: str


def measure(trial: Trial, share_s: float, best_s: float | None) -> Measurement | Failure:
    """A trial's steps until they are steady, then enough for a median; or why it is rejected."""
    if not trial.start():
        return failure_of(trial)
    if trial.elapsed_s > share_s:
        took = format_seconds(trial.elapsed_s)
        return Failure("time", f"its first step took {took}; a dry run may take {format_seconds(share_s)}")
    steps, last = [], 0.0
    for _ in range(WARM_UP):
        before, seconds = last, trial.step()
        if seconds is None:
            return failure_of(trial)
        last = seconds
        if abs(before / last - 1) < STEADY or trial.elapsed_s + last > share_s:
            break
    is_hopeless = best_s is not None and last > HOPELESS * best_s
    for _ in range(1 if is_hopeless else _enough(last)):
        seconds = trial.step()
        if seconds is None:
            return failure_of(trial)
        steps.append(seconds)
        if trial.elapsed_s + seconds > share_s:
            break
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
    """Steps for a median: half a second's worth, 5 to 20."""
    return min(20, max(5, int(0.5 / max(step_s, 1e-6))))


def failure_of(trial: Trial) -> Failure:
    return Failure("time" if trial.is_overdue else "failed", str(trial.failure))
