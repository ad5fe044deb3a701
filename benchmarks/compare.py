"""Timing of variants side by side: shuffled, interleaved, medians with bootstrap intervals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Samples:
    """Seconds of each variant, paired by round: all variants run once in each round, in a shuffled order."""

    seconds: Mapping[str, np.ndarray]

    def ratio(self, variant: str, against: str) -> Interval:
        """Median time of `variant` over that of `against`."""
        return self.interval(lambda picked: float(np.median(picked[variant]) / np.median(picked[against])))

    def difference_us(self, variant: str, against: str) -> Interval:
        """Median over rounds of the extra time of `variant`, in µs."""
        return self.interval(lambda picked: float(np.median(picked[variant] - picked[against]) * 1e6))

    def median_ms(self, variant: str) -> float:
        """The variant's median time in ms."""
        return float(np.median(self.seconds[variant]) * 1e3)

    def interval(self, statistic: Callable[[Mapping[str, np.ndarray]], float], draws: int = 400) -> Interval:
        random_rounds = np.random.default_rng(0)
        rounds = len(next(iter(self.seconds.values())))
        values = []
        for _ in range(draws):
            picked = random_rounds.integers(0, rounds, rounds)
            values.append(statistic({name: times[picked] for name, times in self.seconds.items()}))
        low, high = np.percentile(values, [2.5, 97.5])
        return Interval(statistic(self.seconds), float(low), float(high))


@dataclass(frozen=True)
class Interval:
    """A statistic with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Row:
    """One line of the table: the claim, the measurement, and the bar."""

    claim: str
    measured: str
    bar: str
    holds: bool | None = None  # None if the row is for information


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 20, seed: int = 0) -> Samples:
    """Run every variant once a round, in an order shuffled by `seed`, and time each call."""
    for _ in range(warmup):
        for run in variants.values():
            run()
    order = random.Random(seed)
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start)
    return Samples({name: np.array(times) for name, times in seconds.items()})
