"""Constants of a cluster fitted to measured step times.

The fit is that of `atorch calibrate --runs`.

    python benchmarks/published/fit.py TABLE.csv …

prints the constants that the repository ships. They are fitted on at most 5 % of the rows of a hardware family, drawn
by a hash of their names from `FITTED_MODELS` alone. Runs on one node come first, then, for the network's efficiency,
runs without pipelines on several. All other models are for testing.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from atorch.profiler.curve_fit import NOISE, TimedRun, fitted, with_constants

__all__ = ["NOISE", "TimedRun", "drawn", "fitted", "is_fitted", "with_constants"]

FITTED_MODELS = frozenset(
    {"llama-like 1b", "gpt h1024 l12", "mpt-1b", "mpt-760m", "gpt h1536 l16", "llama3-70b (reduced to 12 layers)"}
)
BETWEEN_NODES: Mapping[str, float] = {"inter_node.efficiency": 1.0, "inter_node.latency_s": 2.0}  # networks differ more


def drawn(runs: Sequence[TimedRun], count: int) -> list[TimedRun]:
    """Draw `count` of the runs by a hash of their names: always the same ones, without a preference."""
    return sorted(runs, key=lambda run: hashlib.sha256(run.name.encode()).hexdigest())[:count]


SHARE = 0.05  # of a family's rows, at most


def main() -> None:
    from benchmarks.published.evaluate import Case, by_data_sheet
    from benchmarks.published.table import read_rows

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE.csv")
    families: dict[str, list[Case]] = defaultdict(list)
    for path in parser.parse_args().tables:
        for case in (by_data_sheet(Case.of(row)) for row in read_rows(path)):
            if case.cluster is not None:
                families[case.cluster.device.name].append(case)
    for device, cases in families.items():
        runs = [case.run for case in cases if case.run and is_fitted(case.row.text("model"))]
        most = _most(cases)
        first = drawn([run for run in runs if run.cluster.num_nodes == 1] or runs, most)
        factors = fitted(first)
        moved = [run._replace(cluster=with_constants(run.cluster, factors)) for run in runs]
        further = drawn([run for run in moved if run.cluster.num_nodes > 1 and run.cost.stages == 1], most - len(first))
        print(f"{device}: {len(first)} rows of one node, then {len(further)} of several, of {len(cases)}")
        for name, factor in {**factors, **fitted(further, BETWEEN_NODES)}.items():
            print(f"    {name}: {_figure(runs[0].cluster, name):.4g} × {factor:.3f}")


def _most(cases: Sequence[Any]) -> int:
    return int(SHARE * len(cases))


def is_fitted(model: str) -> bool:
    """True if shipped constants were fitted on rows of this model."""
    return model.lower() in FITTED_MODELS


def _figure(spec: Any, place: str) -> float:
    for name in place.split("."):
        spec = getattr(spec, name)
    return float(spec)


if __name__ == "__main__":
    main()
