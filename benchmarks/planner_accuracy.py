"""How right the planner is about published runs: memory, what fits, step time, and the order of strategies.

    python benchmarks/planner_accuracy.py TABLE.csv … [--calibrate none|shipped|5] [--json FILE]

A table has the columns that `benchmarks/published/table.py` names. `none` takes speeds from data sheets alone, with one
set of typical efficiencies for every device; `shipped` takes the constants of atorch/clusters; `5` refits those of each
cluster on five rows, chosen by a hash of their names, which are then left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from atorch.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.published.evaluate import CALIBRATIONS, Calibration, evaluate
from benchmarks.published.metrics import Result, doomed_in_first, quantile, summary
from benchmarks.published.table import read_rows
from benchmarks.published.transfer import LARGE, SMALL, transfer

COLUMNS = {
    "rows": "rows",
    "refused": "refused",
    "memory_median_err": "mem med",
    "memory_p95_err": "mem p95",
    "fits_precision": "fits prec",
    "fits_recall": "fits rec",
    "time_mape": "time mean",
    "time_median_err": "time med",
    "spearman_median": "Spearman",
    "regret_top1_mean": "top-1",
    "regret_top1_p95": "top-1 p95",
    "regret_top3_mean": "top-3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE.csv")
    parser.add_argument("--calibrate", choices=CALIBRATIONS, default="shipped")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    try:
        tables = tables_of(arguments.tables, arguments.calibrate)
    except ArgumentError as error:
        parser.error(str(error))
    together = [result for results in tables.values() for result in results]
    report(tables, together)
    report_transfer(arguments.tables)
    if arguments.json:
        data = {"tables": {name: summary(results) for name, results in tables.items()}, "all": summary(together)}
        arguments.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def tables_of(paths: Sequence[Path], calibration: Calibration) -> dict[str, list[Result]]:
    """The results of every table, by the file's name, or its path where two have one name."""
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    return {name: evaluate(read_rows(path), calibration) for name, path in zip(names, paths, strict=True)}


def report(tables: dict[str, list[Result]], together: list[Result]) -> None:
    """Print what the JSON has, then models not fitted on, nvidia-smi's figures, bad proposals, and what was refused."""
    width = max(map(len, [*tables, "models not fitted on"]))
    print(" " * width, *(f"{title:>9}" for title in COLUMNS.values()))
    for name, results in [*tables.items(), ("all", together)]:
        _line(name, width, results)
    _line("models not fitted on", width, [each for each in together if not each.fitted_model])
    driver = quantile([each.memory_error for each in together if each.seen_by_driver], 0.5)
    if driver is not None:
        print(f"memory beside nvidia-smi's figures: median error {driver:.1%}")
    doomed, ranked = doomed_in_first(together)
    print(f"a run labelled out of memory is among the first three of {doomed} of {ranked} cells")
    for each in together:
        if each.refused:
            print(f"refused {each.row_id}: {each.refused}")


def report_transfer(paths: Sequence[Path]) -> None:
    """Print what constants from few devices and the small model are worth, for every table that can tell."""
    for path in paths:
        found = transfer(read_rows(path))
        if found is not None:
            print(
                f"{path.stem}: {found.ordered} runs of {found.large_model} on {LARGE} and more devices, Spearman "
                f"{found.by_small:.3f} by {found.fitted_on} of {found.small_model} on up to {SMALL}, "
                f"{found.by_large:.3f} by as many of their own: loses {found.loss:.3f}"
                + ("" if found.among_small is None else f" (small ones among themselves {found.among_small:.3f})")
            )


def _line(name: str, width: int, results: list[Result]) -> None:
    figures = summary(results)
    print(f"{name:<{width}}", *(f"{_shown(key, figures[key]):>9}" for key in COLUMNS))


def _shown(key: str, value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value}" if key == "rows" else f"{value:.3f}" if key.startswith("spearman") else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
