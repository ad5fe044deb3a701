"""The result of a search: the strategy, its estimate and measurement, and the reason against each of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from atorch.auto.strategy import Strategy
from atorch.errors import ArgumentError, StrategyError
from atorch.files.access import FileKind, write
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from atorch.auto.reference_step import ReferenceStep

Why = Literal["hardware", "memory", "refused", "failed", "time", "slower", "not run"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one step of a strategy by arithmetic, for one device."""

    step_s: float
    peak_bytes: float
    memory: Mapping[str, float]  # category → bytes, the largest first
    stage: int = 0  # pipeline stage with the highest peak, for which the figures are
    reserve_bytes: float = 0.0  # memory that the allocator cannot use, needed in addition to the peak
    on_host_bytes: float = 0.0  # host memory for that device
    time: Mapping[str, float] = field(default_factory=dict)  # category → seconds, which add up to the step's
    samples_per_s: float | None = None
    tokens_per_s: float | None = None  # if samples are sequences
    flops_per_s: float | None = None  # useful FLOP/s of a device, without recomputation
    mfu: float | None = None  # the same as a share of the device's 16-bit peak
    low_s: float | None = None  # lower end of the interval of step_s, if known
    high_s: float | None = None
    low_bytes: float | None = None  # lower end of the interval of peak_bytes, if known
    high_bytes: float | None = None
    high_needed_bytes: float | None = None  # upper end for needed_bytes: nine of ten need less

    @property
    def needed_bytes(self) -> float:
        return self.peak_bytes + self.reserve_bytes


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of real steps of a strategy, on the slowest rank."""

    step_s: float  # the median
    num_steps: int
    startup_s: float  # to the end of the first step
    peak_bytes: float
    memory_kind: str  # the kind of measurement of the peak


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
    """The simplest composition, and the gain of the choice over it, measured or expected."""

    strategy: Strategy
    measured: Measurement | None
    expected_s: float  # of a step; the measured seconds if there are any
    gain: float = 0.0  # share of its step that the choice saves

    def to_json_data(self) -> dict[str, Any]:
        measured = estimate_data(self.measured)
        known = {"expected_s": self.expected_s, "gain": self.gain}
        return {"strategy": strategy_data(self.strategy), "measured": measured, **known}


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The result of a search. `measured` is None if no dry run of the choice was possible or worth its time.

    A notebook shows it as a table; `save_html` writes it as a page.
    """

    strategy: Strategy
    estimate: Estimate | None  # None if there was no time for it
    measured: Measurement | None
    rejected: tuple[Rejected, ...]
    num_compositions: int
    num_dry_runs: int
    seconds: float
    memory_bytes: float  # of a device
    baseline: Baseline | None = None  # the composition that the choice had to beat, unless it failed
    notes: tuple[str, ...] = ()  # remarks on the search for the user
    plain_pass: ReferenceStep | None = field(default=None, repr=False, compare=False)  # to compare the choice with
    # (reason of the choice's failure when it was applied) → the plan with the next best.
    instead: Callable[[str], Plan] | None = field(default=None, repr=False, compare=False)

    @property
    def numbers(self) -> str:
        """The effect of the choice on the numbers of training."""
        effects = [method.numbers for method in self.strategy if method.numbers]
        return "; ".join(effects) or "as in plain training, but that sums may be taken in another order"

    def __repr__(self) -> str:
        figures = self.measured or self.estimate
        cost = figures and f", {format_seconds(figures.step_s)} a step, {format_bytes(figures.peak_bytes)} a device"
        return f"<{type(self).__name__} {self.strategy}{cost or ''}>"

    def _repr_html_(self) -> str:
        from atorch.report.html import plan_fragment

        return plan_fragment(self.to_json_data())

    def save_html(self, path: str | PathLike[str], title: str = "") -> None:
        """Write the plan as one self-contained page, as `atorch plan --html` does.

        Raises:
            ArgumentError: the file cannot be written.
        """
        from atorch.report.html import plan_page

        page = plan_page(self.to_json_data(), title)
        write(path, page.encode(errors="replace"), FileKind("page", ArgumentError))

    def to_json_data(self) -> dict[str, Any]:
        return {
            "strategy": strategy_data(self.strategy),
            "load_strategy": _load_strategy(self.strategy),
            "estimate": estimate_data(self.estimate),
            "measured": estimate_data(self.measured),
            "rejected": [rejected.to_json_data() for rejected in self.rejected],
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


def _load_strategy(strategy: Strategy) -> list[Any] | None:
    """The strategy as data that `Strategy.of` takes; None if a knob is an object of this process."""
    try:
        return strategy.to_list()
    except StrategyError:
        return None


def strategy_data(strategy: Strategy) -> list[str]:
    return [str(method) for method in strategy]
