"""Runs that lost time for a reason that no column explains.

The rule compares measured runs with measured runs and reads no estimate. It takes two runs that agree in everything but
micro-batches, stages, data-parallel ranks and ZeRO's level; the second has as many stages or more. A pipeline takes as
many slots as it has micro-batches and other stages together. For each slot the second run takes at most

- the first run's time, if its micro-batches are as large or smaller; f times that, if they are f times as large;
- with more stages, the share of the model of its longest stage: its part of the blocks, one more block, and the head,
  since nobody cuts worse;
- with f times the data-parallel ranks, f times that: a ring has f times as many hops, so no sum takes longer.

With fewer micro-batches it takes at most as long in all, since micro-batches share the end of a step.

A run that takes more than `MARGIN` times this bound has stalled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from atorch.errors import ArgumentError
from benchmarks.published.layout import Layout, layout_of
from benchmarks.published.shapes import shape_of
from benchmarks.published.table import GIVEN, Row

MARGIN = 1.5  # for noise, stages' sends, and the longer end of a step on fewer ranks
_FREE = ("row_id", "n_gpus", "dp", "zero", "pp", "micro_batch", "grad_accum", "global_batch")


class _Run(NamedTuple):
    """A timed run, with what the rule reads of it."""

    name: str
    seconds: float
    layout: Layout
    layers: float
    head: float  # size of its products over that of a block's

    @property
    def slots(self) -> float:
        """Micro-batches of a stage, and those that would fit in its idle time at both ends."""
        return self.layout.num_micro_batches + self.layout.pipeline - 1

    def longest(self, pieces: float) -> float:
        """Largest share of the model in one of `pieces` stages."""
        return 1.0 if pieces == 1 else min(1.0, (self.layers / pieces + 1 + self.head) / (self.layers + self.head))


def stalled(rows: Sequence[Row], seconds: Mapping[str, float]) -> Collection[str]:
    """Names of the runs that stalled; `seconds` has the measured step times by name."""
    alike: dict[tuple[str, ...], list[_Run]] = defaultdict(list)
    for row in rows:
        if row.row_id in seconds and row.told("micro_batch") and (run := _run(row, seconds[row.row_id])):
            alike[tuple(row.given[name] for name in GIVEN if name not in _FREE)].append(run)
    pairs = (pair for runs in alike.values() for pair in permutations(runs, 2))
    return {other.name for one, other in pairs if _takes_too_long(one, other)}


def _run(row: Row, seconds: float) -> _Run | None:
    try:
        layout, shape = layout_of(row), shape_of(row)
    except ArgumentError:
        return None
    block = shape.hidden * (4.0 * shape.hidden + 3.0 * shape.ffn)
    return _Run(row.row_id, seconds, layout, float(shape.layers), shape.vocab * shape.hidden / block)


def _takes_too_long(one: _Run, other: _Run) -> bool:
    was, now = one.layout, other.layout
    if now.pipeline < was.pipeline:
        return False
    larger = max(1.0, now.micro_batch / was.micro_batch)
    part = 1.0 if now.pipeline == was.pipeline else was.pipeline * other.longest(now.pipeline)
    wider = max(1.0, now.data / was.data)
    slots = other.slots / one.slots
    if now.num_micro_batches < was.num_micro_batches:
        slots = max(1.0, slots)
    return other.seconds > MARGIN * larger * part * wider * slots * one.seconds
