"""Accuracy of the planner on published runs: memory, what fits, step time, and the order of strategies.

    python benchmarks/planner_accuracy.py TABLE.csv … --leave-one-out [--residuals time|memory] [--json FILE]
    python benchmarks/planner_accuracy.py TABLE.csv … [--calibrate none|shipped|5] [--json FILE]

`benchmarks/published/table.py` names a table's columns. `--leave-one-out` estimates each source's runs from the other
sources (`published/leave_out.py`). The output compares the planner with a rule of thumb and a short formula
(`published/rules.py`). It also shows the planner without the runs that stalled (`published/stalls.py`).

`--calibrate none` takes speeds from data sheets alone, with one set of typical efficiencies for every device. `shipped`
takes the constants of atorch/cluster/known, some of which were fitted on rows of these tables. `5` refits those of each
cluster on five rows, chosen by a hash of their names, and leaves these rows out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from atorch.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.published import bands, memory_bands
from benchmarks.published.evaluate import CALIBRATIONS, Calibration, calibrated, results_of
from benchmarks.published.leave_out import Source, by_source, leave_one_out
from benchmarks.published.metrics import Result, mean, quantile, summary
from benchmarks.published.residuals import residuals
from benchmarks.published.rules import rule_of_thumb, short_formula
from benchmarks.published.table import read_rows
from benchmarks.published.transfer import LARGE, SMALL, transfer

COLUMNS = {
    "rows": "rows",
    "refused": "refused",
    "allocated_median_err": "alloc med",
    "allocated_p95_err": "alloc p95",
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
    "cells_with_oom_in_first_three": "OOM in 3",
    "cells_with_labels": "of cells",
}
COUNTS = ("rows", "cells_with_labels")
Figures = Mapping[str, float | int | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE.csv")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--calibrate", choices=CALIBRATIONS, default="shipped")
    how.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--residuals", choices=("time", "memory"))
    parser.add_argument("--rows", type=int, default=20, help="of each framework and device that --residuals shows")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    try:
        if arguments.leave_one_out:
            rows = by_source(row for path in arguments.tables for row in read_rows(path))
            sources, typical = leave_one_out(rows), leave_one_out(rows, fits=False)
        else:
            sources, typical = tables_of(arguments.tables, arguments.calibrate), None
    except ArgumentError as error:
        parser.error(str(error))
    data = report(sources, typical)
    if arguments.leave_one_out:
        data |= bands.report(sources) | memory_bands.report(sources)
    else:
        report_transfer(arguments.tables)
    if arguments.residuals:
        pairs = [pair for source in sources.values() for pair in source]
        print("\n".join(residuals(pairs, arguments.residuals, arguments.rows)))
    if arguments.json:
        arguments.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def tables_of(paths: Sequence[Path], calibration: Calibration) -> dict[str, Source]:
    """The results of every table, by the file's name, or by its path if two files share a name."""
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    results = {}
    for name, path in zip(names, paths, strict=True):
        rows = read_rows(path)
        cases = calibrated(rows, calibration)
        results[name] = list(zip(cases, results_of(cases, rows), strict=True))
    return results


def report(sources: Mapping[str, Source], typical: Mapping[str, Source] | None) -> dict[str, object]:
    """Print the table, nvidia-smi's figures, and refused rows; return the contents of the JSON file.

    `typical` has the estimates with constants that are fitted to nothing, if sources are left out.
    """
    planner = {name: [result for _, result in source] for name, source in sources.items()}
    together = _all_results(sources)
    flowing = [result for result in together if not result.stalled]
    lines = {
        **{name: summary(results) for name, results in planner.items()},
        "all": summary(together),
        "all but stalled": summary(flowing),
        "mean of sources": _mean_of([summary(results) for results in planner.values()]),
    }
    if typical is None:
        lines["models not fitted on"] = summary([result for result in together if not result.fitted_model])
    else:
        lines["all, nothing fitted"] = summary(_all_results(typical))
        lines["all but stalled, nothing fitted"] = summary(
            [result for result in _all_results(typical) if not result.stalled]
        )
    rules = {"rule of thumb": rule_of_thumb, "short formula": short_formula}
    beside = {rule: {name: rank(source) for name, source in sources.items()} for rule, rank in rules.items()}
    for rule, by_name in beside.items():
        lines |= {f"{rule}: {name}": summary(results) for name, results in by_name.items()}
        lines[f"{rule}: all"] = summary([result for results in by_name.values() for result in results])
    width = max(map(len, lines))
    print(" " * width, *(f"{title:>9}" for title in COLUMNS.values()))
    for name, figures in lines.items():
        print(f"{name:<{width}}", *(f"{_formatted(key, figures[key]):>9}" for key in COLUMNS))
    _report_rest(together)
    return {"tables": {name: lines[name] for name in sources}, "all": lines["all"], "lines": lines}


def _all_results(sources: Mapping[str, Source]) -> list[Result]:
    return [result for source in sources.values() for _, result in source]


def _mean_of(summaries: Sequence[Figures]) -> Figures:
    columns = {
        key: [float(value) for figures in summaries if (value := figures[key]) is not None] for key in summaries[0]
    }
    return {key: int(sum(values)) if key in COUNTS else mean(values) for key, values in columns.items()}


def _report_rest(together: Iterable[Result]) -> None:
    driver = quantile([result.memory_error for result in together if result.memory_kind == "driver"], 0.5)
    if driver is not None:
        print(f"memory beside nvidia-smi's figures: median error {driver:.1%}")
    print(f"{sum(result.stalled for result in together)} runs stalled")
    for result in together:
        if result.refused:
            print(f"refused {result.row_id}: {result.refused}")


def report_transfer(paths: Sequence[Path]) -> None:
    """Print the loss from fitting on few devices and the small model, for every table that has both sizes."""
    for path in paths:
        outcome = transfer(read_rows(path))
        if outcome is not None:
            print(
                f"{path.stem}: {outcome.ordered} runs of {outcome.large_model} on {LARGE} and more devices, Spearman "
                f"{outcome.by_small:.3f} by {outcome.fitted_on} of {outcome.small_model} on up to {SMALL}, "
                f"{outcome.by_large:.3f} by as many of their own: loses {outcome.loss:.3f}"
                + ("" if outcome.among_small is None else f" (small ones among themselves {outcome.among_small:.3f})")
            )


def _formatted(key: str, value: float | int | None) -> str:
    if value is None:
        return "–"
    if key in COUNTS:
        return f"{value}"
    if key in ("spearman_median", "cells_with_oom_in_first_three"):
        return f"{value:.3f}" if key.startswith("spearman") else f"{value:.2g}"
    return f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
