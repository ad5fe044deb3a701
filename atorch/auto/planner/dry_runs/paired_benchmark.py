"""The final comparison: the best few and the baseline take steps in turns, so that a disturbance affects all.

A machine's speed drifts more within minutes than compositions differ. So a composition must be faster than the baseline
by more than the noise of these turns; among equally fast ones, the simplest is chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atorch.auto.planner.dry_runs.trial import Trial

TIE = 0.01  # share of a step: smaller differences are ties
SURE = 2.0  # standard errors of the median that a gain must exceed
MIN_TURNS, MAX_TURNS = 5, 60
TURNS_S = 2.0  # seconds of steps for each contender, if steps are quick
NOISY, LONGER = 0.03, 4  # noise of a verdict above which the turns are extended, by up to this factor
WARM_UP = 2
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
    return sum(startups) + (WARM_UP + num_turns(min(steps, default=1.0))) * sum(steps)


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
    for turn in range(WARM_UP + turns * LONGER):
        if turn - WARM_UP in LOOKS:
            for index in _beaten({index: times[index] for index in running}):
                if index != baseline:
                    del running[index]
        if turn >= WARM_UP + turns and _is_clear([times[index] for index in running]):
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
                times[index] = [*times[index], seconds] if turn >= WARM_UP else []
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
