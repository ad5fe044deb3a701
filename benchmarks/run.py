"""Run the benchmarks and print one table.

    python benchmarks/run.py [--quick] [--only step_overhead,import_time] [--markdown]

`--quick` shows that everything runs; its figures are not results.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from compare import Row

CLAIMS = (
    "import_time",
    "step_overhead",
    "straggler_detector",
    "first_pass",
    "host_time",
    "planning_time",
    "search_regret",
    "pipeline_cut",
    "tensor_parallel_step",
    "pipeline_step",
    "smp_step",
    "ring_attention",
    "cross_entropy",
    "chunk_adam",
    "chunk_layout",
    "chunk_traffic",
    "chunk_step",
    "chunk_host_memory",
    "chunk_deepspeed",
    "checkpoint_speed",
    "gpu_methods",
)


def main() -> int:
    """Print the table; returns 1 if a row misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--only", default=",".join(CLAIMS), help="comma-separated names of the files")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.only.split(","):
        measured = importlib.import_module(name).measure(quick=options.quick)
        rows += measured
        for row in measured:
            print(f"{name}: {row.claim}: {row.measured} {verdict(row)}", file=sys.stderr, flush=True)
    print_markdown(rows) if options.markdown else print_table(rows)
    return int(any(row.holds is False for row in rows))


def verdict(row: Row) -> str:
    return {True: "holds", False: "misses", None: ""}[row.holds]


def print_table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("claim", "measured [95 % interval]", "bar", "")
    for row in rows:
        table.add_row(row.claim, row.measured.replace("[", r"\["), row.bar, verdict(row))
    Console(width=150).print(table)


def print_markdown(rows: list[Row]) -> None:
    print("| claim | measured [95 % interval] | bar | |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.claim} | {row.measured} | {row.bar} | {verdict(row)} |")


if __name__ == "__main__":
    sys.exit(main())
