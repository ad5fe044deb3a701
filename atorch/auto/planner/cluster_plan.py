"""A plan for a cluster that need not be present: the choice, near ties, counterfactuals and rejected compositions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atorch.auto.planner.estimate.candidate_table import CATEGORIES, CandidateTable
from atorch.auto.planner.plan import Estimate, Plan, estimate_data, strategy_data
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec

DIGITS = 5  # significant digits of the figures of candidates


@dataclass(frozen=True)
class Ranked:
    """A composition with its estimate."""

    strategy: Strategy
    estimate: Estimate
    chance: float | None = None  # probability that it is faster than the chosen one

    def to_json_data(self) -> dict[str, Any]:
        data = {"strategy": strategy_data(self.strategy), "estimate": estimate_data(self.estimate)}
        return data | ({} if self.chance is None else {"chance": self.chance})


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The expected value of one measurement for the choice: of a strategy, or of a kind of work."""

    saves: float  # expected saving, as a share of a step: it may reveal that another composition is faster
    strategy: Strategy | None = None  # the measurement: five steps of this and of the chosen one
    kind: str = ""  # or a calibration of the machine for this kind of work (`cost.uncertainty`)

    def to_json_data(self) -> dict[str, Any]:
        strategy = None if self.strategy is None else strategy_data(self.strategy)
        return {"saves": self.saves, "strategy": strategy, "kind": self.kind}


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """The effect of one other choice."""

    change: str  # "tensor 4", "zero1 instead of fsdp", "without checkpoint"
    what: str  # the axis with another size, or the method that is added or removed
    ratio: float | None  # of the step's seconds to the chosen one's; None if it does not fit
    reason: str

    def to_json_data(self) -> dict[str, Any]:
        return {"change": self.change, "what": self.what, "ratio": self.ratio, "reason": self.reason}


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterPlan(Plan):
    """A plan by arithmetic alone, without runs; `simulated` has the results if the best were simulated."""

    estimate: Estimate
    cluster: ClusterSpec
    global_batch: int  # samples of a step
    objective: str
    usable_bytes: float  # of a device, without the reserve
    ranking: tuple[Ranked, ...]  # the best that fit, the chosen one first
    near_ties: tuple[Ranked, ...]  # compositions too likely to be faster to distinguish, the simplest first
    decisive: tuple[Measuring, ...]  # measurements that would decide between them, the largest saving first
    counterfactuals: tuple[Counterfactual, ...]
    counts_by_axis: Mapping[str, Mapping[str, int]]  # axis or slot → value → scored compositions that have it
    candidates: CandidateTable  # all that were scored
    num_unopened: Mapping[str, int]  # branches whose bounds exclude that anything is among the best, or fits
    gap: float = 0.0  # share of a step that an unscored composition might save; 0 if the choice is proven the best
    num_legal: int | None = None  # compositions that the choice is the best of, scored or excluded; None: not counted
    simulated: tuple[Mapping[str, Any], ...] = ()
    num_params: int | None = None  # of the model

    @property
    def fits_narrowly(self) -> bool:
        """True if the choice fits by less than the uncertainty of its memory; some such runs go out of memory."""
        return (self.estimate.high_needed_bytes or 0.0) > self.usable_bytes

    def to_json_data(self) -> dict[str, Any]:
        return super().to_json_data() | {
            "fits_narrowly": self.fits_narrowly,
            "cluster": self.cluster.to_json_data(),
            "global_batch": self.global_batch,
            "objective": self.objective,
            "usable_bytes": self.usable_bytes,
            "num_params": self.num_params,
            "ranking": [ranked.to_json_data() for ranked in self.ranking],
            "near_ties": [tie.to_json_data() for tie in self.near_ties],
            "decisive": [measuring.to_json_data() for measuring in self.decisive],
            "counterfactuals": [counterfactual.to_json_data() for counterfactual in self.counterfactuals],
            "counts_by_axis": {axis: dict(counts) for axis, counts in self.counts_by_axis.items()},
            "pareto": [self._point(row) for row in self.candidates.pareto()],
            "candidates": candidate_data(self.candidates),
            "num_unopened": dict(self.num_unopened),
            "gap": self.gap,
            "num_legal": self.num_legal,
            "simulated": [dict(outcome) for outcome in self.simulated],
            "nearest_miss": None,
        }

    def _point(self, row: int) -> dict[str, Any]:
        table = self.candidates
        return {
            "strategy": [str(method) for method in table.methods[row]],
            "step_s": float(table.step_s[row]),
            "peak_bytes": float(table.peak_bytes[row]),
        }


def candidate_data(columns: CandidateTable) -> dict[str, Any]:
    """All scored compositions by column, as plain JSON data."""
    return {
        "step_s": _rounded(columns.step_s),
        "peak_bytes": _rounded(columns.peak_bytes),
        "label": columns.labels(),
        "why": columns.why(),
        "memory": {name: _rounded(columns.memory[:, index]) for index, name in enumerate(CATEGORIES)},
    }


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
