"""Evaluation of a table: every row with the planner's estimates of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from atorch.cluster.spec import ClusterSpec, Efficiency
from atorch.cost import Cost, step_seconds
from atorch.errors import AtorchError
from atorch.units import GiB
from benchmarks.published.alone import matmul_share
from benchmarks.published.fit import TimedRun, drawn, fitted, is_fitted, with_constants
from benchmarks.published.memory import comparable_bytes, fits, metric_of
from benchmarks.published.metrics import Result, runs_out_of_memory
from benchmarks.published.rows import cluster_of, cost_of
from benchmarks.published.stalls import stalled
from benchmarks.published.table import GIVEN, Row

Calibration = Literal["none", "shipped", "5"]
CALIBRATIONS: tuple[Calibration, ...] = ("none", "shipped", "5")

TYPICAL = Efficiency(matmul=0.72, attention=0.4, traffic=0.7)
"""Usual share of a data sheet's figures in training, if nobody measured products by themselves."""
TYPICAL_OF_KERNELS = 0.95  # of the rate of attention kernels by themselves, if a cluster has it
FEW = 5  # rows that a cluster's constants are refitted on


@dataclass(frozen=True, slots=True)
class Case:
    """A row as the planner reads it, or the reason for which it refuses the row."""

    row: Row
    cost: Cost | None = None
    cluster: ClusterSpec | None = None
    refused: str = ""

    @classmethod
    def of(cls, row: Row) -> Case:
        """The row's cost and cluster, with shipped constants."""
        try:
            return cls(row, cost_of(row), cluster_of(row))
        except AtorchError as error:
            return cls(row, refused=str(error))

    @property
    def tokens(self) -> float:
        """Tokens of a step; without a cost, from the row's numbers, with 1 for a missing one."""
        global_batch, seq_len = self.row.told("global_batch"), self.row.told("seq_len")
        if self.cost is not None:
            global_batch = self.cost.batch_size * self.cost.size("data", "zero")
            seq_len = seq_len or max(segment.sequence_length for segment in self.cost.segments)
        return (global_batch or 1.0) * (seq_len or 1.0)

    @property
    def devices(self) -> float:
        """Devices of the run; 1 if unknown."""
        return self.row.told("n_gpus") or (math.prod(self.cost.axes.values()) if self.cost is not None else 1.0)

    @property
    def measured_s(self) -> float | None:
        """Seconds of the step, else from tokens a second; None if neither was published."""
        seconds, rate = self.row.result("step_time_s"), self.row.result("tok_s_gpu")
        if seconds is None and rate:
            return self.tokens / (rate * self.devices)
        return seconds

    @property
    def run(self) -> TimedRun | None:
        """The timed run to fit constants on; None if the row was refused or not timed."""
        if self.cost is None or self.cluster is None or self.measured_s is None or self.row.status != "ok":
            return None
        return TimedRun(self.row.row_id, self.cost, self.cluster, self.measured_s)


def evaluate(rows: Sequence[Row], calibration: Calibration = "shipped") -> list[Result]:
    """The results of a table's rows in order, without rows that constants were refitted on."""
    return results_of(calibrated(rows, calibration), rows)


def calibrated(rows: Sequence[Row], calibration: Calibration) -> list[Case]:
    """The rows' cases with the constants of `calibration`, without rows that these were refitted on."""
    cases = [Case.of(row) for row in rows]
    if calibration == "none":
        return [by_data_sheet(case) for case in cases]
    return _refitted(cases) if calibration == "5" else cases


def results_of(cases: Sequence[Case], rows: Sequence[Row]) -> list[Result]:
    """The cases' results, labelled with the help of the table's other runs."""
    ran = _by_all_but_size(rows)
    timed = {case.row.row_id: seconds for case in cases if (seconds := case.measured_s) and case.row.status == "ok"}
    slow = stalled([case.row for case in cases], timed)
    return [_result(case, ran, stalled=case.row.row_id in slow) for case in cases]


def by_data_sheet(case: Case) -> Case:
    """The case with a device of which only the data sheet is known."""
    if case.cluster is None:
        return case
    device = case.cluster.device
    matmul, half = matmul_share(device, TYPICAL.matmul), device.efficiency.matmul_half_flops  # from the peak alone
    # A share of the rate of attention kernels by themselves.
    attention = TYPICAL_OF_KERNELS if device.attention else TYPICAL.attention
    typical = replace(TYPICAL, matmul=matmul, matmul_half_flops=half, attention=attention)
    return replace(case, cluster=replace(case.cluster, device=replace(device, efficiency=typical)))


def _refitted(cases: Sequence[Case]) -> list[Case]:
    """Each cluster's cases without the few drawn ones, with constants fitted to the drawn ones."""
    by_cluster: dict[str, list[int]] = defaultdict(list)
    for place, case in enumerate(cases):
        by_cluster[case.row.text("hardware")].append(place)
    refitted: dict[int, Case] = {}
    for places in by_cluster.values():
        runs = drawn([run for place in places if (run := cases[place].run) is not None], FEW)
        used, constants = {run.name for run in runs}, fitted(runs)
        for place in places:
            cluster = cases[place].cluster
            if cases[place].row.row_id not in used:
                moved = None if cluster is None else with_constants(cluster, constants)
                refitted[place] = replace(cases[place], cluster=moved)
    return [refitted[place] for place in sorted(refitted)]


Sizes = Mapping[tuple[str, ...], Sequence[tuple[float, float]]]


def _by_all_but_size(rows: Sequence[Row]) -> Sizes:
    """(micro-batch, bytes) of successful runs, by all other columns."""
    sizes: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        size, held = row.told("micro_batch"), row.result("peak_mem_gib")
        if row.status == "ok" and size is not None and held is not None:
            sizes[_but_size(row)].append((size, held * GiB))
    return sizes


def _but_size(row: Row) -> tuple[str, ...]:
    return tuple(row.given[name] for name in GIVEN if name not in ("row_id", "micro_batch", "grad_accum"))


def label_of(row: Row, ran: Sizes) -> Literal["fits", "oom"] | None:
    """Label of a run as fitting or not; None if memory does not explain its end."""
    status = row.status
    if status in ("ok", "oom"):
        return "fits" if status == "ok" else "oom"
    device, size = row.told("gpu_mem_gb"), row.told("micro_batch")
    if status != "crash_or_oom" or device is None or size is None:
        return None
    return "oom" if runs_out_of_memory(size, ran.get(_but_size(row), ()), device * GiB) else None


def _result(case: Case, ran: Sizes, *, stalled: bool) -> Result:
    row, held = case.row, case.row.result("peak_mem_gib")
    seconds, estimated, said_to_fit = None, None, False
    if case.cost is not None and case.cluster is not None:
        seconds, estimated = step_seconds(case.cost, case.cluster), comparable_bytes(row, case.cost)
        said_to_fit = fits(case.cost, case.cluster.device.memory_bytes)
    ended_well = row.status == "ok"
    return Result(
        row_id=row.row_id,
        cell=tuple(row.text(name) for name in ("framework", "model", "n_gpus", "seq_len")),
        global_batch=row.told("global_batch") or 0.0,
        tokens=case.tokens,
        measured_s=case.measured_s if ended_well else None,
        estimated_s=seconds,
        measured_bytes=held * GiB if held is not None and ended_well else None,
        estimated_bytes=estimated,
        memory_kind=metric_of(row),
        label=label_of(row, ran),
        said_to_fit=said_to_fit,
        fitted_model=is_fitted(row.text("model")),
        refused=case.refused,
        stalled=stalled,
    )
