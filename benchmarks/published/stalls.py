"""Runs that lost time which nothing that is told of them explains.

One rule tells them, and it reads no estimate: measured runs are held to measured runs. Two runs are compared that are
alike in everything but micro-batches, stages, data-parallel ranks and ZeRO's level; one of them, the other, has as many
stages or more. Between filling and draining a pipeline takes as long as its micro-batches and other stages together. So
for each of these the other run takes at most

- as long, where its micro-batches are as large or smaller; f times as long where they are f times as large;
- of that, where it has more stages, what the longest of them has of the model: its part of the blocks, one more, and
  the head, as nobody cuts worse;
- f times that, where it has f times the data-parallel ranks, which no sum over them takes longer by: a ring has f times
  as many hops.

With fewer micro-batches it takes at most as long in all, as these share out a step's end.

What takes more than `MARGIN` times that has stalled.
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

MARGIN = 1.5  # noise, what stages send, and what a step's end takes longer on fewer ranks
_FREE = ("row_id", "n_gpus", "dp", "zero", "pp", "micro_batch", "grad_accum", "global_batch")


class _Run(NamedTuple):
    """A run that was timed, and what the rule needs of it."""

    name: str
    seconds: float
    layout: Layout
    layers: float
    head: float  # its products' size over a block's

    @property
    def slots(self) -> float:
        """Micro-batches that a stage computes, or could while it waits for the first and the last."""
        return self.layout.num_micro_batches + self.layout.pipeline - 1

    def longest(self, pieces: float) -> float:
        """Of the model, what a stage has at most if it has so many pieces."""
        return 1.0 if pieces == 1 else min(1.0, (self.layers / pieces + 1 + self.head) / (self.layers + self.head))


def stalled(rows: Sequence[Row], seconds: Mapping[str, float]) -> Collection[str]:
    """The names of those runs that stalled; `seconds` a step were measured, by a run's name."""
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
