"""The result of a search: the strategy, its estimate and measurement, and why each of the others was not taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from atorch.auto.strategy import Strategy

if TYPE_CHECKING:
    from atorch.auto.reference_step import ReferenceStep

Why = Literal["hardware", "memory", "refused", "failed", "time", "slower", "not run"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a strategy by arithmetic, on one device."""

    step_s: float
    peak_bytes: float
    memory: Mapping[str, float]  # category → bytes, the largest first
    stage: int = 0  # of the pipeline, whose device needs the most
    reserve_bytes: float = 0.0  # beside the peak, what the allocator cannot use: it must have both
    on_host_bytes: float = 0.0  # beside them, in host memory for that device
    time: Mapping[str, float] = field(default_factory=dict)  # category → seconds, which add up to the step's
    samples_per_s: float | None = None
    tokens_per_s: float | None = None  # where samples are sequences
    flops_per_s: float | None = None  # of a device, of what the model needs: nothing that runs again counts
    mfu: float | None = None  # the share of the device's 16-bit peak that this is
    low_s: float | None = None  # between which the step is expected, where it is known how far estimates are off
    high_s: float | None = None
    low_bytes: float | None = None  # between which the peak is expected, where that is known
    high_bytes: float | None = None
    high_needed_bytes: float | None = None  # the same of what fits or not: nine of ten need less

    @property
    def needed_bytes(self) -> float:
        return self.peak_bytes + self.reserve_bytes


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of real steps of a strategy, on the slowest rank."""

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
        return {
            "strategy": strategy_data(self.strategy),
            "why": self.why,
            "reason": self.reason,
            "estimate": estimate_data(self.estimate),
            "measured": estimate_data(self.measured),
        }


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The simplest composition, and what a choice gains on it by what is known of both, measured or expected."""

    strategy: Strategy
    measured: Measurement | None
    expected_s: float  # a step, as measured where it was
    gain: float = 0.0  # of its step, what the choice takes less

    def to_json_data(self) -> dict[str, Any]:
        measured = estimate_data(self.measured)
        known = {"expected_s": self.expected_s, "gain": self.gain}
        return {"strategy": strategy_data(self.strategy), "measured": measured, **known}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The outcome of a search. `measured` is None where no dry run of the choice was worth its time, or possible."""

    strategy: Strategy
    estimate: Estimate | None  # None where there was no time for it
    measured: Measurement | None
    rejected: tuple[Rejected, ...]
    num_compositions: int
    num_dry_runs: int
    seconds: float
    memory_bytes: float  # what a device has
    baseline: Baseline | None = None  # what a choice had to beat, where it did not fail
    notes: tuple[str, ...] = ()  # what of the search its reader should know
    plain_pass: ReferenceStep | None = field(default=None, repr=False, compare=False)  # what the choice is held to
    # The plan where the choice failed when it was applied, and why: the next best.
    instead: Callable[[str], Plan] | None = field(default=None, repr=False, compare=False)

    @property
    def numbers(self) -> str:
        """The effect of the choice on the numbers that are trained with."""
        said = [each.numbers for each in self.strategy if each.numbers]
        return "; ".join(said) or "as in plain training, but that sums may be taken in another order"

    def to_json_data(self) -> dict[str, Any]:
        return {
            "strategy": strategy_data(self.strategy),
            "estimate": estimate_data(self.estimate),
            "measured": estimate_data(self.measured),
            "rejected": [each.to_json_data() for each in self.rejected],
            "num_compositions": self.num_compositions,
            "num_dry_runs": self.num_dry_runs,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "baseline": None if self.baseline is None else self.baseline.to_json_data(),
            "numbers": self.numbers,
            "notes": list(self.notes),
        }


def estimate_data(value: Estimate | Measurement | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def strategy_data(strategy: Strategy) -> list[str]:
    return [str(each) for each in strategy]
