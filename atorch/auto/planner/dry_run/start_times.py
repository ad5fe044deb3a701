"""Seconds to start a composition, until its first step is done: by kind of device, corrected by what starts.

A start builds: the model is copied, cut up and its optimizer made. Where something is compiled, so is each operation
of one copy of the repeated blocks, as blocks of one kind compile once, or of a whole model that has none. What this
machine compiled before for the same job lies in the compiler's cache on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atorch.auto.planner.dry_run.calibration import Past
from atorch.auto.planner.dry_run.trial_order import compiles
from atorch.auto.strategy import Strategy

FIRST_STEPS = 3.0  # steps that a start takes: two passes that are held to plain training's, and the first step
SPREAD, NOISE = 0.5, 0.3  # standard deviations of the logarithm: of a kind of start on a machine, and of one start


class StartCosts(NamedTuple):
    """Seconds that starts take on a kind of device."""

    build_s: float
    bytes_per_s: float  # of parameters, which are copied
    compile_s: float  # importing the compiler among it
    op_s: float  # for each operation that is compiled
    warm: float  # of a compilation, what is left where its results are in the cache


COSTS: Mapping[str, StartCosts] = {
    # An H200 (benchmarks/measured/h200.json): a Llama of 1.1B in fp32 starts in 5 to 8 s; with its blocks compiled, of
    # 81 operations, the first step is done after 8.6 s where nothing is copied.
    "cuda": StartCosts(build_s=2.5, bytes_per_s=1.6e9, compile_s=5.0, op_s=0.045, warm=0.4),
    "cpu": StartCosts(build_s=0.1, bytes_per_s=1e9, compile_s=10.0, op_s=0.5, warm=0.4),
}


@dataclass
class Starts:
    """Seconds that starts of one job are expected to take.

    Args:
        num_ops: operations that a compiler would see.
        past: what earlier searches saw on the machine.
    """

    device_type: str
    num_ops: float = 0.0
    param_bytes: float = 0.0
    past: Past = Past()
    _ratios: dict[str, list[float]] = field(default_factory=dict)  # kind → logarithms of seen over expected

    def __post_init__(self) -> None:
        self._costs = COSTS.get(self.device_type, COSTS["cuda"])
        self._known = {each.methods for each in self.past.observations if each.job == self.past.job}
        self._began: set[frozenset[str]] = set()
        for each in self.past.observations:
            if each.start_ratio is not None:
                self._ratios.setdefault(each.start_kind, []).append(math.log(each.start_ratio))

    def kind(self, strategy: Strategy) -> str:
        """The kind of its next start: "build", or "compile" besides, or "warm" where that is in the cache."""
        if not compiles(strategy):
            return "build"
        methods = frozenset(map(repr, strategy))
        return "warm" if methods in self._known or methods in self._began else "compile"

    def expected_s(self, strategy: Strategy, step_s: float) -> float:
        """Seconds until its first step is done."""
        return self.of_kind(self.kind(strategy)) + FIRST_STEPS * step_s

    def of_kind(self, kind: str) -> float:
        """Seconds of a kind of start, without its steps."""
        return sum(self._parts(kind))

    def saw(self, strategy: Strategy, seconds: float, step_s: float) -> tuple[str, float]:
        """Learn from a start of so many seconds: its kind, and how it differs from what the table says."""
        kind, (build_s, compiled_s) = self.kind(strategy), self._parts(self.kind(strategy))
        rest = seconds - FIRST_STEPS * step_s - (build_s if kind != "build" else 0.0)
        expected = (build_s if kind == "build" else compiled_s) / self._factor(kind)
        ratio = min(10.0, max(0.1, rest / expected))
        self._ratios.setdefault(kind, []).append(math.log(ratio))
        self._began.add(frozenset(map(repr, strategy)))
        return kind, ratio

    def _parts(self, kind: str) -> tuple[float, float]:
        """Building, and compiling."""
        costs = self._costs
        build_s = (costs.build_s + self.param_bytes / costs.bytes_per_s) * self._factor("build")
        if kind == "build":
            return build_s, 0.0
        compiled_s = (costs.compile_s + costs.op_s * self.num_ops) * self._factor(kind)
        return build_s, compiled_s * (costs.warm if kind == "warm" else 1.0)

    def _factor(self, kind: str) -> float:
        """The factor of a kind of start on the table's, given what was seen: the mean of a normal logarithm."""
        seen = self._ratios.get(kind, [])
        return math.exp(sum(seen) / (len(seen) + NOISE**2 / SPREAD**2))
