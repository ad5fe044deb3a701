"""Errors of memory estimates by kind of bytes, fitted without the source in question, and the coverage of their bands.

Fits the bands of `atorch/cost/memory.py` as `bands.py` does. The driver's figures are left out, since they
include bytes of no category. Some versions of a framework keep what tensor ranks gathered, others do not, and no column
names the version. Such runs are not fitted, but figures on bands include them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atorch.cost import peak_memory
from atorch.cost.memory import OWN, RESERVE, SIGMA, STUCK, memory_shares
from benchmarks.published.bands import Vector, covering, most_probable, spread_of
from benchmarks.published.evaluate import Case
from benchmarks.published.leave_out import Source
from benchmarks.published.memory import memory_of

BEFORE: Mapping[str, float] = {"states": 0.02, "activations": 0.1, "working": 0.1, "slack": 0.3}


class Run(NamedTuple):
    """A run whose bytes torch counted, with its shares of kinds of bytes."""

    error: float  # the logarithm of measured over estimated
    shares: tuple[float, ...]
    is_told: bool = True  # its columns determine what it keeps


@dataclass(frozen=True)
class Bands:
    """Sigmas by kind of bytes, and quantiles of errors over a run's sigma."""

    sigma: Mapping[str, float]
    low: float
    high: float

    def spread(self, shares: Sequence[tuple[float, ...]]) -> Vector:
        """The sigma of each run."""
        return spread_of(np.asarray(list(self.sigma.values())), np.asarray(shares), OWN)


def runs_of(source: Source) -> list[Run]:
    """Runs of a source that torch measured and the planner estimated."""
    found = []
    for case, result in source:
        if case.cost is None or not result.measured_bytes or result.memory_kind == "driver":
            continue
        memory = memory_of(case.row, case.cost).by_category()
        if result.memory_kind == "allocated":
            memory.pop("slack", None)
        error = math.log(result.measured_bytes / sum(memory.values()))
        is_told = not case.cost.held_gathers or case.cost.tensor == 1
        found.append(Run(error, memory_shares(memory), is_told))
    return found


def fitted(sources: Sequence[Sequence[Run]]) -> Bands:
    """The sigmas that errors of some sources make most probable, and the quantiles that they then have."""
    sources = [found for runs in sources if (found := [run for run in runs if run.is_told])]
    errors = np.asarray([run.error for runs in sources for run in runs])
    shares = np.asarray([run.shares for runs in sources for run in runs])
    says = np.asarray([1 / len(runs) for runs in sources for _ in runs])
    sigma = most_probable(errors, shares, says, own=OWN, before=[BEFORE[kind] for kind in SIGMA])
    low, high = covering(errors / spread_of(sigma, shares, OWN), says, len(sources))
    return Bands(dict(zip(SIGMA, sigma.tolist(), strict=True)), low, high)


def report(sources: Mapping[str, Source]) -> dict[str, object]:
    """Print the coverage of each left-out source, the runs that fit narrowly, and the sigmas of all sources."""
    runs = {name: found for name, source in sources.items() if (found := runs_of(source))}
    if sum(any(run.is_told for run in found) for found in runs.values()) < 2:
        return {}  # nothing is left to fit
    of_others = {name: fitted([found for other, found in runs.items() if other != name]) for name in runs}
    bands = fitted(list(runs.values()))
    lines = {name: _line([(mine, of_others[name])]) for name, mine in runs.items()}
    known = list(lines.values())
    together = _line([(mine, of_others[name]) for name, mine in runs.items()])
    lines |= {
        "all": together,
        "mean of sources": {key: sum(line[key] for line in known) / len(known) for key in together},
    }
    width = max(map(len, lines))
    print(f"\n{'80 % bands of memory':<{width}} {'runs':>6} {'hold':>7} {'told':>6} {'hold':>7} {'from':>6} {'to':>6}")
    for name, line in lines.items():
        held = f"{100 * line['held']:5.1f} % {line['told']:6.0f} {100 * line['held_of_told']:5.1f} %"
        print(f"{name:<{width}} {line['runs']:6.0f} {held} {line['from']:6.2f} {line['to']:6.2f}")
    rooms = [room for name, source in sources.items() for room in _rooms(source, of_others.get(name, bands))]
    fits = {}
    for words, is_narrow in (("narrowly", True), ("with room", False)):
        found = [room.fits for room in rooms if room.is_narrow == is_narrow]
        fits[words] = {"said": len(found), "do": sum(found)}
        print(f"said to fit {words}: {sum(found)} of {len(found)} do")
    print("atorch/cost/memory.py, as these tables have it:")
    figures = [*bands.sigma.items(), ("LOW", bands.low), ("HIGH", bands.high)]
    print("   ", ", ".join(f"{name} {value:.3g}" for name, value in figures))
    return {"memory_bands": {"bands": lines, "fits": fits, **dict(figures)}}


def _line(parts: Sequence[tuple[Sequence[Run], Bands]]) -> dict[str, float]:
    """Coverage of some runs by the bands of other sources."""
    spreads = [bands.spread([run.shares for run in runs]) for runs, bands in parts]
    low = np.concatenate([bands.low * spread for (_, bands), spread in zip(parts, spreads, strict=True)])
    high = np.concatenate([bands.high * spread for (_, bands), spread in zip(parts, spreads, strict=True)])
    errors = np.asarray([run.error for runs, _ in parts for run in runs])
    told = np.asarray([run.is_told for runs, _ in parts for run in runs])
    held = (errors >= low) & (errors <= high)
    return {
        "runs": float(len(errors)),
        "held": float(held.mean()),
        "told": float(told.sum()),
        "held_of_told": float(held[told].mean()) if told.any() else 0.0,
        "from": float(np.exp(low.mean())),
        "to": float(np.exp(high.mean())),
    }


class _Room(NamedTuple):
    is_narrow: bool
    fits: bool


def _rooms(source: Source, bands: Bands) -> list[_Room]:
    """Labelled runs that were predicted to fit, and whether the margin is less than the estimate's error."""
    return [
        _Room(_most(case, bands) > (1 - RESERVE) * case.cluster.device.memory_bytes, result.label == "fits")
        for case, result in source
        if result.said_to_fit and result.label and case.cost is not None and case.cluster is not None
    ]


def _most(case: Case, bands: Bands) -> float:
    """Bytes that suffice for an allocator in nine of ten runs."""
    assert case.cost is not None
    memory = peak_memory(case.cost).by_category()
    memory["slack"] = STUCK * memory.get("slack", 0.0)
    (spread,) = bands.spread([memory_shares(memory)])
    return sum(memory.values()) * math.exp(bands.high * spread)
