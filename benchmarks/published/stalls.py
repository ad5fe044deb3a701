"""Runs that lost time which nothing that is told of them explains.

Two rules tell them, and neither reads an estimate.

- *Of a pair*: two runs that are alike but for the micro-batch and ZeRO's level. Micro-batches of f times the samples
  are f times fewer, each takes as long at least and f times as long at most, and a pipeline is filled with them in the
  same proportion: neither run can take more than f times the other. ZeRO's first two levels send as many bytes as none.
  What takes more than `MARGIN` · f times its like has stalled.
- *By columns*: with pipelines over 64 nodes, or tensor ranks on four, every run of nanotron that was published is slow,
  so that no pair can tell. The pattern was found in those runs; it holds for that framework alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from benchmarks.published.table import GIVEN, Row

MARGIN = 1.5  # noise, and what a reduction over another number of micro-batches differs by
_FREE = ("row_id", "micro_batch", "grad_accum", "zero")


def stalled(rows: Sequence[Row], seconds: Mapping[str, float]) -> Collection[str]:
    """The names of those runs that stalled, by either rule; `seconds` a step were measured, by a run's name."""
    alike: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.row_id in seconds and row.told("micro_batch"):
            alike[tuple(row.given[name] for name in GIVEN if name not in _FREE)].append(row)
    pairs = (pair for runs in alike.values() for pair in combinations(runs, 2))
    slower = {found for pair in pairs if (found := _slower(*pair, seconds))}
    return slower | {row.row_id for row in rows if row.row_id in seconds and _is_known_to_stall(row)}


def _slower(one: Row, other: Row, seconds: Mapping[str, float]) -> str:
    """The run of a pair that takes more than it can; "" where neither does."""
    sizes = [row.told("micro_batch") or 1.0 for row in (one, other)]
    first, last = sorted((one.row_id, other.row_id), key=seconds.__getitem__)
    return last if seconds[last] > MARGIN * max(sizes) / min(sizes) * seconds[first] else ""


def _is_known_to_stall(row: Row) -> bool:
    tensor, pipeline, devices = (row.told(name) or 1.0 for name in ("tp", "pp", "n_gpus"))
    return "nanotron" in row.text("framework") and pipeline > 1 and (devices >= 512 or tensor >= 32)
