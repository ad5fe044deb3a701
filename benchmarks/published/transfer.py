"""Accuracy for a large model on many devices of constants that were fitted on a small model and few devices.

In a table with both, constants are fitted on runs of its smallest model on at most 8 devices. They rank the runs of its
largest model on at least 128. The loss is against constants that were fitted on as many of those runs. A further figure
shows how well the same constants rank the small runs, most of which they were not fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.published.evaluate import Case, by_data_sheet, results_of
from benchmarks.published.fit import SHARE, drawn, fitted, with_constants
from benchmarks.published.metrics import LEAST_IN_CELL, cells, summary
from benchmarks.published.table import Row

SMALL = 8  # devices at most
LARGE = 128  # devices at least


class Transfer(NamedTuple):
    """Median Spearman of the large model's cells, by the source of the constants."""

    small_model: str
    large_model: str
    fitted_on: int  # runs
    ordered: int  # runs
    by_small: float
    by_large: float
    among_small: float | None  # of the small model's cells on few devices, with the same constants

    @property
    def loss(self) -> float:
        """Spearman lost by not fitting on the large model and many devices."""
        return self.by_large - self.by_small


def transfer(rows: Sequence[Row]) -> Transfer | None:
    """Order of a table's large runs with constants from its small ones; None without both."""
    timed = [case for case in map(Case.of, rows) if case.run is not None]
    models = sorted({case.row.text("model") for case in timed}, key=lambda name: _params(timed, name))
    if len(models) < 2:
        return None
    small = [case for case in timed if case.row.text("model") == models[0] and case.devices <= SMALL]
    large = [case for case in timed if case.row.text("model") == models[-1] and case.devices >= LARGE]
    ranked = any(len(cell) >= LEAST_IN_CELL for cell in cells(results_of(large, rows)))
    if len(small) < LEAST_IN_CELL or not ranked:
        return None
    count = min(len(small), len(large), max(LEAST_IN_CELL, int(SHARE * len(rows))))
    by_small, by_large = (_order(large, few, count, rows) for few in (small, large))
    if by_small is None or by_large is None:
        return None
    return Transfer(models[0], models[-1], count, len(large), by_small, by_large, _order(small, small, count, rows))


def _params(cases: Sequence[Case], model: str) -> float:
    costs = (case.cost for case in cases if case.row.text("model") == model)
    return max(sum(part.count * part.num_params for part in cost.segments) for cost in costs if cost is not None)


def _order(cases: Sequence[Case], source: Sequence[Case], count: int, rows: Sequence[Row]) -> float | None:
    """Median Spearman within the cases' cells, with constants fitted on runs of `source`."""
    runs = [run for case in source if (run := by_data_sheet(case).run) is not None]
    constants = fitted(drawn(runs, count))
    sheets = [by_data_sheet(case) for case in cases]
    moved = [
        case if case.cluster is None else replace(case, cluster=with_constants(case.cluster, constants))
        for case in sheets
    ]
    order = summary(results_of(moved, rows))["spearman_median"]
    return None if order is None else float(order)
