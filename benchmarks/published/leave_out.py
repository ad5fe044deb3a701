"""Estimates of each source of published runs, without anything that was learnt from that source.

A source is a publisher: a repository, or a paper. For its runs, a device's constants start as typical of any GPU. They
are then fitted to runs of all other sources on that device, at most `PER_SOURCE` of each, drawn by a hash of their
names. If no other source has the device, they stay typical. Peculiarities of a source affect all of its runs, so many
of its runs say little more than few: `OF_A_SOURCE`. Nothing is fitted between nodes, since networks differ from site to
site. Traits of frameworks that were read off published runs are left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.published.evaluate import Case, by_data_sheet, results_of
from benchmarks.published.fit import NOISE, TimedRun, drawn, fitted, with_constants
from benchmarks.published.metrics import Result
from benchmarks.published.table import Row

PER_SOURCE = 20  # runs of a device that one source contributes
OF_A_SOURCE = 0.15  # error of a run's logarithm that all runs of a source share
CARRIED = ("device.", "intra_node.")  # constants that hold at another site

Source = list[tuple[Case, Result]]


def by_source(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each publisher."""
    by_publisher: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_publisher[row.publisher].append(row)
    return by_publisher


def leave_one_out(sources: Mapping[str, Sequence[Row]], *, fits: bool = True) -> dict[str, Source]:
    """Every row of every source with estimates by constants fitted to the other sources, or to none without `fits`."""
    learnt_from = {name: _runs(rows) for name, rows in sources.items()} if fits else {}
    results = {}
    for name, rows in sources.items():
        cases = [by_data_sheet(Case.of(replace(row, knows_runs=False))) for row in rows]
        devices = sorted({case.cluster.device.name for case in cases if case.cluster is not None})
        factors = {device: _fitted_to_others(learnt_from, name, device) for device in devices}
        moved = [case if case.cluster is None else _moved(case, factors[case.cluster.device.name]) for case in cases]
        results[name] = list(zip(moved, results_of(moved, rows), strict=True))
    return results


def _runs(rows: Sequence[Row]) -> dict[str, list[TimedRun]]:
    """A few runs of each device that did not stall, with typical constants."""
    cases = [by_data_sheet(Case.of(row)) for row in rows]
    by_device: dict[str, list[TimedRun]] = defaultdict(list)
    for case, result in zip(cases, results_of(cases, rows), strict=True):
        if case.run is not None and not result.stalled:
            by_device[case.run.cluster.device.name].append(case.run)
    return {device: drawn(runs, PER_SOURCE) for device, runs in by_device.items()}


def _fitted_to_others(
    sources: Mapping[str, Mapping[str, Sequence[TimedRun]]], held_out: str, device: str
) -> dict[str, float]:
    others = [runs[device] for name, runs in sources.items() if name != held_out and device in runs]
    noise = [math.hypot(NOISE, OF_A_SOURCE * math.sqrt(len(runs))) for runs in others for _ in runs]
    return fitted([run for runs in others for run in runs], noise=noise)


def _moved(case: Case, factors: Mapping[str, float]) -> Case:
    assert case.cluster is not None
    carried = {place: factor for place, factor in factors.items() if place.startswith(CARRIED)}
    return replace(case, cluster=with_constants(case.cluster, carried))
