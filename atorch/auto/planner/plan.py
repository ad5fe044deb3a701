"""What a search found: the strategy, what was expected and measured of it, and why each of the others was not taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from atorch.auto.strategy import Strategy

Why = Literal["hardware", "memory", "failed", "time", "slower", "not run"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What arithmetic says of a strategy, on one device."""

    step_s: float
    peak_bytes: float
    memory: Mapping[str, float]  # category → bytes, the largest first


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What real steps of a strategy took, on the slowest rank."""

    step_s: float  # the median
    num_steps: int
    startup_s: float  # until the first step was done
    peak_bytes: float
    memory_kind: str  # how the peak was measured


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """One composition that was not chosen."""

    strategy: Strategy
    why: Why
    reason: str
    estimate: Estimate | None = None
    measured: Measurement | None = None

    def to_json_data(self) -> dict[str, Any]:
        """What was rejected and why, as plain JSON data."""
        return {
            "strategy": _strategy_data(self.strategy),
            "why": self.why,
            "reason": self.reason,
            "estimate": _data(self.estimate),
            "measured": _data(self.measured),
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The outcome of a search. `measured` is None where no dry run was possible."""

    strategy: Strategy
    estimate: Estimate
    measured: Measurement | None
    rejected: tuple[Rejected, ...]
    num_compositions: int
    num_dry_runs: int
    seconds: float
    memory_bytes: float  # what a device has

    def to_json_data(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        return {
            "strategy": _strategy_data(self.strategy),
            "estimate": _data(self.estimate),
            "measured": _data(self.measured),
            "rejected": [each.to_json_data() for each in self.rejected],
            "num_compositions": self.num_compositions,
            "num_dry_runs": self.num_dry_runs,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
        }


def _data(value: Estimate | Measurement | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _strategy_data(strategy: Strategy) -> list[str]:
    return [str(each) for each in strategy]
