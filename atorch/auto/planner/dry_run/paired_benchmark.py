"""The last word: the best few and the baseline, measured step by step in turns, so that what disturbs one disturbs all.

A machine's speed drifts more in minutes than compositions differ. Only what is faster than the baseline by more than
the noise of these very turns may be taken; among those as fast as each other, the simplest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atorch.auto.planner.dry_run.step_timing import OnTrial

TIE = 0.01  # of a step: nearer than this is as fast
SURE = 2.0  # standard errors of the median that a gain must exceed
MIN_TURNS, MAX_TURNS = 5, 60
TURNS_S = 2.0  # of steps of each, where they are quick
NOISY, LONGER = 0.03, 4  # where a verdict is noisier than this, so many times the turns
WARM_UP = 2
LOOKS = (10, 20, 40)  # turns after which what is surely slower leaves


@dataclass(frozen=True)
class Verdict:
    """The result of turns for one contender: its seconds over the baseline's in the same turn."""

    ratio: float  # the median
    noise: float  # the standard error of its logarithm

    @classmethod
    def of(cls, seconds: Sequence[float], baseline: Sequence[float]) -> Verdict:
        logs = [math.log(mine / theirs) for mine, theirs in zip(seconds, baseline, strict=True)]
        middle = statistics.median(logs)
        spread = 1.4826 * statistics.median(abs(each - middle) for each in logs)  # σ, of normal ones
        return cls(math.exp(middle), 1.2533 * spread / math.sqrt(len(logs)))

    @property
    def is_faster(self) -> bool:
        """True if faster by more than counts as a tie, beyond the noise."""
        return math.log(self.ratio) + SURE * self.noise < -TIE


def num_turns(step_s: float) -> int:
    """The number of turns that make a verdict on steps so long."""
    return min(MAX_TURNS, max(MIN_TURNS + 2, int(TURNS_S / max(step_s, 1e-6))))


def seconds_needed(startups: Sequence[float], steps: Sequence[float]) -> float:
    """Seconds to start these and let them step in turns."""
    return sum(startups) + (WARM_UP + num_turns(min(steps, default=1.0))) * sum(steps)


def in_turns(
    trials: Mapping[int, OnTrial],
    turns: int,
    goes_on: Callable[[float], bool],
    failed: Callable[[int], None],
    baseline: int | None = None,
) -> dict[int, list[float]]:
    """Seconds of every trial by turn, after some that only warm up.

    A trial that fails is told to `failed` and left out from there on. One that is surely slower than the fastest stops,
    with the seconds of the turns it had, but for `baseline`, beside which all are held; alone it need not go on. Noise
    makes it longer. `goes_on`, asked before a turn that is expected to take so many seconds, ends it where that is too
    long.
    """
    running, times = dict(trials), {index: list[float]() for index in trials}
    for turn in range(WARM_UP + turns * LONGER):
        if turn - WARM_UP in LOOKS:
            for index in _beaten({index: times[index] for index in running}):
                if index != baseline:
                    del running[index]
        if turn >= WARM_UP + turns and _is_clear([times[index] for index in running]):
            break
        if len(running) < min(2, len(trials)) or not goes_on(sum(times[each][-1] for each in running if times[each])):
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
    """Trials that are surely slower than the fastest, of the same turns."""
    if not times:
        return set()
    fastest = min(times, key=lambda index: statistics.median(times[index]))
    return {index for index in times if Verdict.of(times[fastest], times[index]).is_faster}


def _is_clear(times: Sequence[Sequence[float]]) -> bool:
    """True if noise is small in what one is to another."""
    return all(Verdict.of(each, times[0]).noise <= NOISY for each in times[1:])
