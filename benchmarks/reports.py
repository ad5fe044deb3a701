"""Public reports that nothing was fitted to: what `atorch plan --explain` says of each, against what happened.

    python benchmarks/reports.py [--only WORD] [--json FILE]

`published/reports.json` has one row a report, each with its source. `fits` is what happened, `seconds` of a step or
`tokens_s` of a device were measured, and `gib` is its memory by `metric`: "allocated" by torch, "reserved" by its
allocator, or "driver", of nvidia-smi. A row is kept apart: nothing is fitted to it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from atorch.cli import main as atorch
from atorch.units import GiB

REPORTS = Path(__file__).parent / "published" / "reports.json"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The planner's answer to a report; ratios are of the estimate over the measurement."""

    name: str
    fits: bool
    said_to_fit: bool | None = None  # None: refused
    refused: str = ""
    time: float | None = None
    in_band: bool | None = None
    memory: float | None = None
    metric: str = ""
    estimate: Mapping[str, Any] | None = None

    @property
    def is_right(self) -> bool:
        return self.said_to_fit == self.fits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="reports whose name has it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    answers = []
    for report in reports():
        if arguments.only.lower() in report["name"].lower():
            answers.append(answer_of(report))
            print(shown(answers[-1]), flush=True)
    timed = [answer for answer in answers if answer.in_band is not None]
    print(f"\nfits, or does not, as reported: {sum(answer.is_right for answer in answers)} of {len(answers)}")
    print(f"step times in the band: {sum(bool(answer.in_band) for answer in timed)} of {len(timed)}")
    for metric in sorted({answer.metric for answer in answers if answer.memory}):
        errors = [abs(answer.memory - 1) for answer in answers if answer.memory and answer.metric == metric]
        print(f"memory, {metric}: {len(errors)} reports, median error {median(errors):.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=2) + "\n", encoding="utf-8")


def reports() -> list[dict[str, Any]]:
    return list(json.loads(REPORTS.read_text(encoding="utf-8")))


def answer_of(report: Mapping[str, Any]) -> Answer:
    """Ask `atorch plan --explain` for a report's configuration or command."""
    with tempfile.TemporaryDirectory() as folder:
        out, configuration = Path(folder) / "out.json", report.get("words")
        if configuration is None:
            configuration = str(Path(folder) / "configuration.json")
            Path(configuration).write_text(json.dumps(report["values"]), encoding="utf-8")
        given = ["plan", *shlex.split(report["options"]), "--explain", configuration, "--json", str(out)]
        told = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            atorch(given)
        if not out.exists():
            return Answer(name=report["name"], fits=report["fits"], refused=told.getvalue().strip())
        data = json.loads(out.read_text(encoding="utf-8"))
    estimate, seconds = data["estimate"], report.get("seconds")
    if "tokens_s" in report:
        devices = data["cluster"]["num_nodes"] * data["cluster"]["devices_per_node"]
        seconds = estimate["step_s"] * estimate["tokens_per_s"] / devices / report["tokens_s"]
    held = estimate["peak_bytes"] + (0.0 if report.get("metric") == "allocated" else estimate["reserve_bytes"])
    return Answer(
        name=report["name"],
        fits=report["fits"],
        said_to_fit=data["fits"],
        time=estimate["step_s"] / seconds if seconds else None,
        in_band=estimate["low_s"] <= seconds <= estimate["high_s"] if seconds else None,
        memory=held / GiB / report["gib"] if "gib" in report else None,
        metric=report.get("metric", ""),
        estimate=estimate,
    )


def shown(answer: Answer) -> str:
    """An answer in one line."""
    said = {None: f"refused: {answer.refused}", True: "fits", False: "does not fit"}[answer.said_to_fit]
    parts = [f"{answer.name}: {said}{'' if answer.is_right else '  ✗'}"]
    if answer.time is not None:
        parts.append(f"time {answer.time - 1:+.0%}{'' if answer.in_band else ', outside the band'}")
    if answer.memory is not None:
        parts.append(f"{answer.metric} memory {answer.memory - 1:+.0%}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
