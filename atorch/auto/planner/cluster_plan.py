"""A plan for a cluster that need not be here: the choice, what came near, what else there is, what was in the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atorch.auto.planner.estimate.candidate_table import CATEGORIES, CandidateTable
from atorch.auto.planner.plan import Estimate, Plan, estimate_data, strategy_data
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec

DIGITS = 5  # of the figures of candidates


@dataclass(frozen=True)
class Ranked:
    """A composition with what arithmetic says of it."""

    strategy: Strategy
    estimate: Estimate
    chance: float | None = None  # that it is faster than the chosen one

    def to_json_data(self) -> dict[str, Any]:
        data = {"strategy": strategy_data(self.strategy), "estimate": estimate_data(self.estimate)}
        return data | ({} if self.chance is None else {"chance": self.chance})


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The value of one measurement before the choice is believed."""

    saves: float  # of a step, on average: as often as it tells that another composition is faster, and by how much
    strategy: Strategy | None = None  # five steps of it and of the chosen one
    kind: str = ""  # or a kind of work (`cost.uncertainty`), by a calibration of the machine

    def to_json_data(self) -> dict[str, Any]:
        strategy = None if self.strategy is None else strategy_data(self.strategy)
        return {"saves": self.saves, "strategy": strategy, "kind": self.kind}


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """The effect of one other choice."""

    change: str  # "tensor 4", "zero1 instead of fsdp", "without checkpoint"
    what: str  # the axis that has another size, or the method that comes or goes
    ratio: float | None  # of the step's seconds to the chosen one's; None where it does not fit
    reason: str

    def to_json_data(self) -> dict[str, Any]:
        return {"change": self.change, "what": self.what, "ratio": self.ratio, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class ClusterPlan(Plan):
    """A plan by arithmetic alone. Nothing was run; `simulated` is for who simulates the best of the ranking."""

    estimate: Estimate
    cluster: ClusterSpec
    global_batch: int  # samples of a step
    objective: str
    usable_bytes: float  # of a device, without the reserve
    ranking: tuple[Ranked, ...]  # the best that fit, the chosen one first
    near_ties: tuple[Ranked, ...]  # whose chance of being faster is too large to tell them apart, the simplest first
    decisive: tuple[Measuring, ...]  # what would decide between them, what saves most first
    counterfactuals: tuple[Counterfactual, ...]
    counts_by_axis: Mapping[str, Mapping[str, int]]  # axis or slot → value → scored compositions that have it
    candidates: CandidateTable  # all that were scored
    num_unopened: Mapping[str, int]  # branches in which, by their bounds, nothing is among the best, or nothing fits
    gap: float = 0.0  # of a step, what something that was not scored might save; 0 where the choice is proven the best
    num_legal: int | None = None  # compositions that the choice is the best of, scored or ruled out; None: not counted
    simulated: tuple[Mapping[str, Any], ...] = ()

    @property
    def fits_narrowly(self) -> bool:
        """True if the choice fits by less than its memory may be off: some such runs go out of memory."""
        return (self.estimate.high_needed_bytes or 0.0) > self.usable_bytes

    def to_json_data(self) -> dict[str, Any]:
        return super().to_json_data() | {
            "fits_narrowly": self.fits_narrowly,
            "cluster": self.cluster.to_json_data(),
            "global_batch": self.global_batch,
            "objective": self.objective,
            "usable_bytes": self.usable_bytes,
            "ranking": [each.to_json_data() for each in self.ranking],
            "near_ties": [each.to_json_data() for each in self.near_ties],
            "decisive": [each.to_json_data() for each in self.decisive],
            "counterfactuals": [each.to_json_data() for each in self.counterfactuals],
            "counts_by_axis": {axis: dict(counts) for axis, counts in self.counts_by_axis.items()},
            "pareto": [self._point(row) for row in self.candidates.pareto()],
            "candidates": candidate_data(self.candidates),
            "num_unopened": dict(self.num_unopened),
            "gap": self.gap,
            "num_legal": self.num_legal,
            "simulated": [dict(each) for each in self.simulated],
            "nearest_miss": None,
        }

    def _point(self, row: int) -> dict[str, Any]:
        found = self.candidates
        return {
            "strategy": [str(each) for each in found.methods[row]],
            "step_s": float(found.step_s[row]),
            "peak_bytes": float(found.peak_bytes[row]),
        }


def candidate_data(columns: CandidateTable) -> dict[str, Any]:
    """All scored compositions column by column, as plain JSON data."""
    return {
        "step_s": _rounded(columns.step_s),
        "peak_bytes": _rounded(columns.peak_bytes),
        "label": columns.labels(),
        "why": columns.why(),
        "memory": {name: _rounded(columns.memory[:, index]) for index, name in enumerate(CATEGORIES)},
    }


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
