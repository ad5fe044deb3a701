"""The result of a search: the strategy, its estimate and measurement, and the reason against each of the others.

A `ClusterPlan` is for a cluster that need not be present: it adds near ties, counterfactuals and all that was scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atorch.auto.planner.candidate_table import CandidateTable
from atorch.auto.planner.training import RunRequest, Training, training_of
from atorch.auto.strategy import Strategy
from atorch.cluster.prices import Price, Prices, load_prices, price_of
from atorch.cluster.spec import ClusterSpec
from atorch.cost.memory import CATEGORIES
from atorch.errors import ArgumentError, StrategyError
from atorch.files import FileKind, write
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from atorch.auto.reference_step import ReferenceStep

Why = Literal["hardware", "memory", "refused", "failed", "time", "slower", "not run"]
SCHEMA = 1  # version of `Plan.to_json_data`: it grows when a key changes its meaning or goes, not when one comes
DIGITS = 5  # significant digits of the figures of candidates


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of one step of a strategy by arithmetic, for one device."""

    step_s: float
    peak_bytes: float
    memory: Mapping[str, float]  # category → bytes, the largest first
    stage: int = 0  # pipeline stage with the highest peak, for which the figures are
    reserve_bytes: float = 0.0  # memory that the allocator cannot use, needed in addition to the peak
    on_host_bytes: float = 0.0  # host memory for that device
    checkpoint_bytes: float = 0.0  # that a process writes, in the mean; held in host memory if in the background
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
    strategy: Strategy
    why: Why
    reason: str
    estimate: Estimate | None = None
    measured: Measurement | None = None


@dataclass(frozen=True)
class Scored:
    strategy: Strategy
    estimate: Estimate
    chance: float | None = None  # probability that it is faster than the chosen one, if known

    def rejected(self, why: Why, reason: str, measured: Measurement | None = None) -> Rejected:
        return Rejected(strategy=self.strategy, why=why, reason=reason, estimate=self.estimate, measured=measured)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The simplest composition, and the gain of the choice over it, measured or expected."""

    strategy: Strategy
    measured: Measurement | None
    expected_s: float  # of a step; the measured seconds if there are any
    gain: float = 0.0  # share of its step that the choice saves


@dataclass(frozen=True, kw_only=True)
class MeasurementValue:
    """The expected value of one measurement for the choice: of a strategy, or of a kind of work."""

    saves: float  # expected saving, as a share of a step: it may reveal that another composition is faster
    strategy: Strategy | None = None  # the measurement: five steps of this and of the chosen one
    kind: str = ""  # or a calibration of the machine for this kind of work (`cost.uncertainty`)


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    change: str  # "tensor 4", "zero1 instead of fsdp", "without checkpoint"
    what: str  # the axis with another size, or the method that is added or removed
    ratio: float | None  # of the step's seconds to the chosen one's; None if it does not fit
    reason: str


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

        write(path, plan_page(self.to_json_data(), title), FileKind("page", ArgumentError))

    def to_json_data(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **json_data(self), "numbers": self.numbers}


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterPlan(Plan):
    """A plan by arithmetic alone, without runs; `simulated` has the results if the best were simulated."""

    estimate: Estimate
    cluster: ClusterSpec
    global_batch: int  # samples of a step
    objective: str
    usable_bytes: float  # of a device, without the reserve
    ranking: tuple[Scored, ...]  # the best that fit, the chosen one first
    near_ties: tuple[Scored, ...]  # compositions too likely to be faster to distinguish, the simplest first
    decisive: tuple[MeasurementValue, ...]  # measurements that would decide between them, the largest saving first
    counterfactuals: tuple[Counterfactual, ...]
    counts_by_axis: Mapping[str, Mapping[str, int]]  # axis or slot → value → scored compositions that have it
    candidates: CandidateTable  # all that were scored
    num_unopened: Mapping[str, int]  # branches whose bounds exclude that anything is among the best, or fits
    gap: float = 0.0  # share of a step that an unscored composition might save; 0 if the choice is proven the best
    num_legal: int | None = None  # compositions that the choice is the best of, scored or excluded; None: not counted
    simulated: tuple[Mapping[str, Any], ...] = ()
    num_params: int | None = None  # of the model
    solved: Mapping[str, Any] | None = None  # the size that was looked for: what, size, tried, words
    price: Price | None = None  # of a device, if it was asked for and is known
    training: Training | None = None  # a whole run, if it was asked for
    model: str | None = None  # its id on the Hub, if it has one
    seq: int | None = None  # tokens of a sample, if samples are sequences
    recipe: Mapping[str, Any] = field(default_factory=dict)  # knobs that say how the model is trained, as lora

    @property
    def fits_narrowly(self) -> bool:
        """True if the choice fits by less than the uncertainty of its memory; some such runs go out of memory."""
        return (self.estimate.high_needed_bytes or 0.0) > self.usable_bytes

    def explain(self, *, verbose: bool = False) -> str:
        """The whole answer as text, as `atorch plan` (with `verbose`, `atorch plan --verbose`) prints it."""
        from atorch.report.answer import answer_text

        return answer_text(self.to_json_data(), verbose)

    def export(
        self, trainer: str, folder: str | PathLike[str], *, launcher: str = "sh", force: bool = False
    ) -> list[Path]:
        """Write the configuration of another trainer and the file that starts it, as `atorch plan --export` does.

        A plan with `target=trainer` has only what the trainer can express.

        Args:
            trainer: such as "deepspeed"; the folder is made if it is not there.
            launcher: what starts it: "sh", "slurm", "kubernetes" or "skypilot".
            force: replace files that are there.

        Returns:
            The files; the last one starts the job.

        Raises:
            ArgumentError: an unknown trainer or launcher, the folder cannot be written to, or files are there already.
            StrategyError: the trainer lacks something of the strategy.
        """
        from atorch.trainer_configs.launch import export

        return export(self, trainer, Path(folder), launcher, force)

    def priced(self, prices: str | PathLike[str] | Prices | None = None) -> ClusterPlan:
        """The plan with the price of its devices, from a price file, or from the public offers that come with atorch.

        Raises:
            ArgumentError: the file is no price file.
        """
        price = price_of(self.cluster, prices if isinstance(prices, tuple) else load_prices(prices))
        note = f"no price is known for {self.cluster.device.name}; give a price file (prices, --prices)"
        return replace(self, price=price, notes=self.notes if price else (*self.notes, note))

    def until(self, amount: Any, *, mtbf: Any = None, restart: Any = None) -> ClusterPlan:
        """The plan with `training`: hours, device-hours, goodput and, if it is `priced`, the cost of a whole run.

        Args:
            amount, mtbf, restart: see `RunRequest`, which may be given as the amount.

        Raises:
            ArgumentError: an invalid value, or failures leave no time to train.
        """
        request = amount if isinstance(amount, RunRequest) else RunRequest(amount, mtbf, restart)
        return replace(self, training=training_of(self, request))

    def to_json_data(self) -> dict[str, Any]:
        table = self.candidates
        pareto = [
            {
                "strategy": [str(method) for method in table.methods[row]],
                "load_strategy": _load_strategy(Strategy(table.methods[row])),
                "step_s": table.step_s[row],
                "peak_bytes": table.peak_bytes[row],
            }
            for row in table.pareto()
        ]
        return super().to_json_data() | {"fits_narrowly": self.fits_narrowly, "pareto": pareto, "nearest_miss": None}


def _load_strategy(strategy: Strategy) -> list[Any] | None:
    """The strategy as data that `Strategy.of` takes; None if a knob is an object of this process."""
    try:
        return strategy.to_list()
    except StrategyError:
        return None


def json_data(value: Any) -> Any:
    """A record of this module as plain JSON data; fields without a repr are left out."""
    if isinstance(value, Strategy):
        return [str(method) for method in value]
    if isinstance(value, ClusterSpec):
        return value.to_json_data()
    if isinstance(value, CandidateTable):
        memory = {name: _rounded(value.memory(index)) for index, name in enumerate(CATEGORIES)}
        times, peaks = _rounded(value.step_s), _rounded(value.peak_bytes)
        return {"step_s": times, "peak_bytes": peaks, "label": value.labels(), "why": value.why(), "memory": memory}
    if is_dataclass(value):
        data = {known.name: json_data(getattr(value, known.name)) for known in fields(value) if known.repr}
        strategy = getattr(value, "strategy", None)
        return data | ({"load_strategy": _load_strategy(strategy)} if isinstance(strategy, Strategy) else {})
    if isinstance(value, Mapping):
        return {name: json_data(entry) for name, entry in value.items()}
    return list(map(json_data, value)) if isinstance(value, tuple) else value


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]
