"""Accuracy of estimates: of memory, of what fits, of time, and of the order of a cell's runs.

Errors are |estimate / measured - 1|. A refused row is a miss wherever the row has a measurement: an error of 100 %,
predicted not to fit. Within a cell, runs are ranked by seconds per token. Runs that are refused or predicted not to fit
are not ranked, since nobody would be advised to run them. Runs that are ranked alike come in random order: figures are
exact expected values over these orders. Regret is the loss of the choice against the best measured run of the cell. If
nothing of a cell is ranked, it is the regret of the slowest run. A figure without rows is None.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

LEAST_IN_CELL = 5  # runs; fewer give no meaningful order
DIGITS = 9  # significant digits of an estimate; equal ones are a tie

Metric = Literal["allocated", "reserved", "driver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A published run with its estimates. A value that was not published, or was refused, is None."""

    row_id: str
    cell: tuple[str, ...]  # framework, model, devices, sequence length
    global_batch: float
    tokens: float  # of a step
    measured_s: float | None = None
    estimated_s: float | None = None
    measured_bytes: float | None = None
    estimated_bytes: float | None = None
    memory_kind: Metric = "reserved"  # "driver" is nvidia-smi's: the context of CUDA and other processes' too
    label: Literal["fits", "oom"] | None = None
    said_to_fit: bool = False
    fitted_model: bool = False  # shipped constants were fitted on rows of this model
    refused: str = ""  # the reason
    stalled: bool = False  # lost time that no column explains: stalls.py
    place: float | None = None  # in the order of a rule without estimates; the least is first

    @property
    def time_error(self) -> float | None:
        """Signed and relative; None without a published time, -1 without an estimate."""
        return None if self.place is not None else _error(self.estimated_s, self.measured_s)

    @property
    def memory_error(self) -> float | None:
        """Signed and relative; None without published memory, -1 without an estimate."""
        return None if self.place is not None else _error(self.estimated_bytes, self.measured_bytes)

    @property
    def is_ranked(self) -> bool:
        """True if the planner would propose this run."""
        return self.said_to_fit and (self.place is not None or self.estimated_s is not None)


def _error(estimated: float | None, measured: float | None) -> float | None:
    if measured is None:
        return None
    return -1.0 if estimated is None else estimated / measured - 1.0


def summary(results: Sequence[Result]) -> dict[str, float | int | None]:
    """Every figure of a table's results, as fractions."""
    by_torch = [result.memory_error for result in results if result.memory_kind != "driver"]
    allocated = [result.memory_error for result in results if result.memory_kind == "allocated"]
    times = [result.time_error for result in results]
    labelled = [result for result in results if result.label and result.place is None]
    ranked = [cell for cell in cells(results) if len(cell) >= LEAST_IN_CELL]
    first = [regret(cell, 1) for cell in ranked]
    doomed, proposed = doomed_in_first(results)
    return {
        "rows": len(results),
        "refused": sum(bool(result.refused) for result in results) / len(results) if results else None,
        "memory_median_err": quantile(by_torch, 0.5),
        "memory_p95_err": quantile(by_torch, 0.95),
        "fits_precision": _share([result.label == "fits" for result in labelled if result.said_to_fit]),
        "fits_recall": _share([result.said_to_fit for result in labelled if result.label == "fits"]),
        "time_mape": mean([abs(error) for error in times if error is not None]),
        "time_median_err": quantile(times, 0.5),
        "spearman_median": quantile([_order(cell) for cell in ranked], 0.5, signed=True),
        "regret_top1_mean": mean(first),
        "regret_top1_p95": quantile(first, 0.95),
        "regret_top3_mean": mean([regret(cell, 3) for cell in ranked]),
        "allocated_median_err": quantile(allocated, 0.5),
        "allocated_p95_err": quantile(allocated, 0.95),
        "ranked_cells": len(ranked),
        "cells_with_oom_in_first_three": doomed,
        "cells_with_labels": proposed,
    }


def cells(results: Iterable[Result]) -> list[list[Result]]:
    """Groups of runs that are ranked together: of one cell, and of one global batch if enough runs have it."""
    by_cell: dict[tuple[str, ...], dict[float, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.measured_s is not None:
            by_cell[result.cell][result.global_batch].append(result)
    groups = []
    for by_batch in by_cell.values():
        large = [runs for runs in by_batch.values() if len(runs) >= LEAST_IN_CELL]
        rest = [run for runs in by_batch.values() if len(runs) < LEAST_IN_CELL for run in runs]
        groups += [*large, rest] if rest else large
    return groups


def regret(cell: Sequence[Result], tries: int) -> float:
    """Time of the best of the `tries` runs ranked first over the best of all, - 1, expected over orders of ties."""
    best = min(map(_measured, cell))
    found, left = math.inf, tries
    for tied in in_order(cell):
        times = [_measured(run) for run in tied]
        if len(tied) > left:
            return _least_of_drawn([min(found, seconds) for seconds in times], left) / best - 1.0
        found, left = min([found, *times]), left - len(tied)
        if not left:
            break
    return (found if found < math.inf else max(map(_measured, cell))) / best - 1.0


def in_order(runs: Iterable[Result]) -> list[list[Result]]:
    """The ranked runs, best first, with ties in one list."""
    ranked = sorted((run for run in runs if run.is_ranked), key=_place)
    return [list(tied) for _, tied in groupby(ranked, _place)]


def _least_of_drawn(values: Sequence[float], count: int) -> float:
    """The expected least of `count` > 0 of the values, drawn at random.

    The i-th smallest is the least drawn if all other drawn values come after it.
    """
    ways = math.comb(len(values), count)
    behind = range(len(values) - 1, -1, -1)
    return sum(value * math.comb(rest, count - 1) / ways for value, rest in zip(sorted(values), behind, strict=True))


def _place(run: Result) -> float:
    return float(f"{_estimated(run):.{DIGITS}g}")


def _estimated(run: Result) -> float:
    if run.place is not None:
        return run.place
    return math.inf if run.estimated_s is None else run.estimated_s / run.tokens


def _measured(run: Result) -> float:
    assert run.measured_s is not None  # cells hold only runs that were timed
    return run.measured_s / run.tokens


def _order(cell: Sequence[Result]) -> float | None:
    ranked = [run for run in cell if run.is_ranked]
    if len(ranked) < LEAST_IN_CELL:
        return None
    return spearman([_place(run) for run in ranked], [_measured(run) for run in ranked])


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None if one side is constant."""
    x, y = ranks(left), ranks(right)
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / spread if spread else None


def ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Ranks from 1 for the smallest; equal values share the mean of their ranks."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return np.asarray(below + (equal + 1) / 2, dtype=np.float64)


def doomed_in_first(results: Sequence[Result], tries: int = 3) -> tuple[float, int]:
    """Number of cells in which one of the `tries` runs ranked first is labelled out of memory, and of all cells.

    Only labelled runs are ranked. Ties count by the share of their orders that has such a run.
    """
    candidates: dict[tuple[tuple[str, ...], float], list[Result]] = defaultdict(list)
    for result in results:
        if result.label is not None and result.is_ranked:
            candidates[result.cell, result.global_batch].append(result)
    return sum(_chance_of_doom(cell, tries) for cell in candidates.values()), len(candidates)


def _chance_of_doom(cell: Sequence[Result], tries: int) -> float:
    spared, left = 1.0, tries
    for tied in in_order(cell):
        drawn, well = min(left, len(tied)), sum(run.label != "oom" for run in tied)
        spared *= math.comb(well, drawn) / math.comb(len(tied), drawn)
        left -= drawn
        if not left:
            break
    return 1.0 - spared


def quantile(values: Sequence[float | None], share: float, *, signed: bool = False) -> float | None:
    """A quantile by linear interpolation, of absolute values unless `signed`; None without values."""
    sizes = [value if signed else abs(value) for value in values if value is not None]
    return float(np.quantile(sizes, share)) if sizes else None


def mean(values: Sequence[float]) -> float | None:
    """The mean; None without values."""
    return sum(values) / len(values) if values else None


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


def runs_out_of_memory(micro_batch: float, ran: Sequence[tuple[float, float]], device_bytes: float) -> bool:
    """True if memory explains a crash: a line through runs that differ only in micro-batch exceeds the device.

    `ran` has (micro-batch, bytes) of successful runs. The least-squares line needs two sizes.
    """
    sizes = np.asarray([size for size, _ in ran])
    if len(set(sizes.tolist())) < 2:
        return False
    slope, intercept = np.polyfit(sizes, np.asarray([held for _, held in ran]), 1)
    return bool(intercept + slope * micro_batch > device_bytes)
