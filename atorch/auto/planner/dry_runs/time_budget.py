"""The time limit of a search, by rank 0's clock, and the expected seconds of a composition's start.

A start ends with the first step. It copies and splits the model and makes the optimizer. A compiler compiles every
operation of one repeated block, since equal blocks compile once, or of a whole model without such blocks. Results of
earlier compilations for the same job on this machine are in the compiler's disk cache. Observed starts correct the
expected ones by kind of start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atorch.auto.planner.dry_runs.calibration import Past
from atorch.auto.planner.ranking import compiles
from atorch.auto.strategy import Strategy

KEPT = 0.05  # share of a limit for cleaning up at its end
DEFAULT_S = 90.0  # default limit
DEFAULT_STEPS, DEFAULT_STARTS = 60, 16  # steps of the choice, and starts without compiler, if these take longer


@dataclass
class TimeBudget:
    """Seconds since a search began, and those left of its limit; None: the default, which grows with the step time."""

    limit: float | None = None
    now: Callable[[], float] = time.monotonic
    began: float = field(default=math.nan)
    _default: float = DEFAULT_S

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            self.began = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.began

    @property
    def whole(self) -> float:
        return (self._default if self.limit is None else self.limit) * (1 - KEPT)

    @property
    def left(self) -> float:
        """Seconds left of the limit, less the share for the end; negative if it is over."""
        return self.whole - self.seconds

    def expects(self, step_s: float, start_s: float) -> None:
        """Set the expected seconds of the choice's step, and of a start without compiler, for the default limit."""
        self._default = max(DEFAULT_S, DEFAULT_STEPS * step_s, DEFAULT_STARTS * start_s)


FIRST_STEPS = 3.0  # steps in a start: two passes of the verification, and the first step
SPREAD, NOISE = 0.5, 0.3  # standard deviations of the logarithm: of a kind of start on a machine, and of one start


class StartCosts(NamedTuple):
    """Costs of starts on a kind of device."""

    build_s: float
    bytes_per_s: float  # speed of copying parameters
    compile_s: float  # includes the import of the compiler
    op_s: float  # for each compiled operation
    warm: float  # share of a compilation that remains if its results are in the cache


COSTS: Mapping[str, StartCosts] = {
    # An H200 (benchmarks/measured/h200.json): a Llama of 1.1B in fp32 starts in 5 to 8 s. With its blocks of 81
    # operations compiled, and without a copy, the first step ends after 8.6 s.
    "cuda": StartCosts(build_s=2.5, bytes_per_s=1.6e9, compile_s=5.0, op_s=0.045, warm=0.4),
    "cpu": StartCosts(build_s=0.1, bytes_per_s=1e9, compile_s=10.0, op_s=0.5, warm=0.4),
}


@dataclass
class Starts:
    """Expected seconds of the starts of one job.

    Args:
        num_ops: operations that a compiler would see.
        past: observations of earlier searches on the machine.
    """

    device_type: str
    num_ops: float = 0.0
    param_bytes: float = 0.0
    past: Past = Past()
    _ratios: dict[str, list[float]] = field(default_factory=dict)  # kind → logarithms of seen over expected

    def __post_init__(self) -> None:
        self._costs = COSTS.get(self.device_type, COSTS["cuda"])
        self._earlier = {observed.methods for observed in self.past.observations if observed.job == self.past.job}
        self._began: set[frozenset[str]] = set()
        for observation in self.past.observations:
            if observation.start_ratio is not None:
                self._ratios.setdefault(observation.start_kind, []).append(math.log(observation.start_ratio))

    def kind(self, strategy: Strategy) -> str:
        """The kind of the strategy's next start: "build"; "compile" if it also compiles; "warm" if from the cache."""
        if not compiles(strategy):
            return "build"
        methods = frozenset(map(repr, strategy))
        return "warm" if methods in self._earlier or methods in self._began else "compile"

    def expected_s(self, strategy: Strategy, step_s: float) -> float:
        return self.of_kind(self.kind(strategy)) + FIRST_STEPS * step_s

    def of_kind(self, kind: str) -> float:
        """Seconds of a kind of start, without its steps."""
        return sum(self._parts(kind))

    def saw(self, strategy: Strategy, seconds: float, step_s: float) -> tuple[str, float]:
        """Learn from the seconds of a start; returns its kind, and the ratio to the seconds of `COSTS`."""
        kind, (build_s, compiled_s) = self.kind(strategy), self._parts(self.kind(strategy))
        rest = seconds - FIRST_STEPS * step_s - (build_s if kind != "build" else 0.0)
        expected = (build_s if kind == "build" else compiled_s) / self._factor(kind)
        ratio = min(10.0, max(0.1, rest / expected))
        self._ratios.setdefault(kind, []).append(math.log(ratio))
        self._began.add(frozenset(map(repr, strategy)))
        return kind, ratio

    def _parts(self, kind: str) -> tuple[float, float]:
        costs = self._costs
        build_s = (costs.build_s + self.param_bytes / costs.bytes_per_s) * self._factor("build")
        if kind == "build":
            return build_s, 0.0
        compiled_s = (costs.compile_s + costs.op_s * self.num_ops) * self._factor(kind)
        return build_s, compiled_s * (costs.warm if kind == "warm" else 1.0)

    def _factor(self, kind: str) -> float:
        """The factor of a kind of start over the table's: the posterior mean of a normal logarithm."""
        ratios = self._ratios.get(kind, [])
        return math.exp(sum(ratios) / (len(ratios) + NOISE**2 / SPREAD**2))
