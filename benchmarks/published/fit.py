"""Constants of a cluster fitted to measured step times.

Every constant is known before anything is measured, within a factor: that is its prior. A fit is the most probable set
of constants under the prior and the runs, with log-normal errors of both (maximum a posteriori, by Gauss-Newton), so
that few runs move few constants, and only as far as they must. A run that nothing explains counts as far as it is
off, not by the square of it: Huber 1964, "Robust Estimation of a Location Parameter".

    python benchmarks/published/fit.py TABLE.csv …

prints the constants that the repository ships: fitted on at most 5 % of the rows of a hardware family, drawn by a hash
of their names from `FITTED_MODELS` alone: first runs on one node, then runs without pipelines on several, for what the
network reaches. All other models are for testing.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, step_seconds

FITTED_MODELS = frozenset(
    {"llama-like 1b", "gpt h1024 l12", "mpt-1b", "mpt-760m", "gpt h1536 l16", "llama3-70b (reduced to 12 layers)"}
)
SPREAD: Mapping[str, float] = {
    # The standard deviation of a constant's logarithm before anything is measured.
    "device.efficiency.matmul": 0.2,
    "device.efficiency.attention": 0.3,
    "device.efficiency.traffic": 0.25,
    "device.launch_s": 0.3,
    "intra_node.efficiency": 0.2,
    "intra_node.latency_s": 0.5,
    "inter_node.efficiency": 0.4,
    "inter_node.latency_s": 0.5,
}
BETWEEN_NODES: Mapping[str, float] = {"inter_node.efficiency": 1.0, "inter_node.latency_s": 2.0}  # networks differ more
NOISE = 0.08  # of a run's logarithm: what no constant explains
ROUNDS = 8

Vector = np.ndarray[Any, np.dtype[np.float64]]


class Run(NamedTuple):
    """A measured step."""

    name: str
    cost: Cost
    cluster: ClusterSpec
    seconds: float


def drawn(runs: Sequence[Run], count: int) -> list[Run]:
    """`count` of the runs, by a hash of their names: the same ones for everybody, and none in particular."""
    return sorted(runs, key=lambda run: hashlib.sha256(run.name.encode()).hexdigest())[:count]


def fitted(
    runs: Sequence[Run], spread: Mapping[str, float] = SPREAD, noise: float | Sequence[float] = NOISE
) -> dict[str, float]:
    """The factors on constants, by their place in the cluster, that the runs make most probable; none of no runs."""
    if not runs:
        return {}
    names, widths = list(spread), np.asarray(list(spread.values()))
    measured = np.log([run.seconds for run in runs])

    def residuals(offsets: Vector) -> Vector:
        factors = dict(zip(names, np.exp(offsets), strict=True))
        estimated = np.log([step_seconds(run.cost, with_constants(run.cluster, factors)) for run in runs])
        return np.concatenate([_robust((estimated - measured) / np.asarray(noise)), offsets / widths])

    return dict(zip(names, np.exp(gauss_newton(residuals, len(names))).tolist(), strict=True))


def _robust(errors: Vector) -> Vector:
    """What squares to a pseudo-Huber loss: as the square of small errors, as twice the size of large ones."""
    return np.asarray(np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1)))


def gauss_newton(residuals: Callable[[Vector], Vector], size: int) -> Vector:
    """The offsets, from zero, that minimise the sum of squared residuals; steps that make it worse are halved."""
    offsets, step = np.zeros(size), 1e-3
    current = residuals(offsets)
    for _ in range(ROUNDS):
        jacobian = np.stack([(residuals(offsets + step * unit) - current) / step for unit in np.eye(size)], axis=1)
        move = np.linalg.lstsq(jacobian, -current, rcond=None)[0]
        for _ in range(6):
            proposed = residuals(offsets + move)
            if proposed @ proposed < current @ current:
                offsets, current = offsets + move, proposed
                break
            move = move / 2
        else:
            break
    return offsets


def with_constants(cluster: ClusterSpec, factors: Mapping[str, float]) -> ClusterSpec:
    """`cluster` with figures multiplied, by their place; shares stay at most 1."""
    for name, factor in factors.items():
        cluster = _scaled(cluster, name.split("."), factor)
    return cluster


def _scaled(spec: Any, path: Sequence[str], factor: float) -> Any:
    name, rest = path[0], path[1:]
    value = getattr(spec, name)
    if rest:
        return replace(spec, **{name: _scaled(value, rest, factor)})
    is_share = name in ("efficiency", "matmul", "attention", "traffic")
    return replace(spec, **{name: min(1.0, value * factor) if is_share else value * factor})


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
        alone = drawn([run for run in runs if run.cluster.num_nodes == 1] or runs, most)
        factors = fitted(alone)
        moved = [run._replace(cluster=with_constants(run.cluster, factors)) for run in runs]
        apart = drawn([run for run in moved if run.cluster.num_nodes > 1 and run.cost.stages == 1], most - len(alone))
        print(f"{device}: {len(alone)} rows of one node, then {len(apart)} of several, of {len(cases)}")
        for name, factor in {**factors, **fitted(apart, BETWEEN_NODES)}.items():
            print(f"    {name}: {_figure(runs[0].cluster, name):.4g} × {factor:.3f}")


def _most(cases: Sequence[Any]) -> int:
    return int(SHARE * len(cases))


def is_fitted(model: str) -> bool:
    """Whether shipped constants were fitted on rows of a model."""
    return model.lower() in FITTED_MODELS


def _figure(spec: Any, place: str) -> float:
    for name in place.split("."):
        spec = getattr(spec, name)
    return float(spec)


if __name__ == "__main__":
    main()
