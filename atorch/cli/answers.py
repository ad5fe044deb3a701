"""Output of answers: on the terminal, in the files that a command line requests, and a note on each file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atorch.errors import ArgumentError, AtorchError, NoFeasiblePlanError
from atorch.files import check_target, write
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.planner.plan import ClusterPlan


@dataclass(frozen=True)
class NamedAnswer:
    """A plan, and for `--fit` the limit that was found, as data and in `words`."""

    plan: ClusterPlan
    fit: Mapping[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        return self.plan.to_json_data() | ({"fit": self.fit} if self.fit else {})


@dataclass(frozen=True)
class Outputs:
    json: Path | None
    html: Path | None
    save: Path | None
    command: str = ""  # for the page

    def check(self, num_clusters: int) -> None:
        """Refuse files that cannot be written, before anything is computed for them.

        Raises:
            ArgumentError: a file cannot be written, or is for one cluster while there are several.
        """
        for path in (self.json, self.html, self.save):
            if path is not None:
                check_target(path)
        if self.save is not None and num_clusters > 1:
            raise ArgumentError(f"--save writes the answer for one cluster, and there are {num_clusters}; give one")


def give(
    answers: Sequence[tuple[str, NamedAnswer | AtorchError]], title: str, outputs: Outputs, top: int, verbose: bool
) -> None:
    """Show the answer for each cluster, and write the requested files.

    Raises:
        NoFeasiblePlanError: nothing fits on any cluster, or nothing that fits can be applied and saved.
    """
    from rich.console import Console

    from atorch.report.answer import answer_report, clusters_report
    from atorch.report.html import plan_page, plans_page

    console, result = Console(highlight=False), answers[0][1]
    data: Mapping[str, Any]
    if len(answers) == 1 and isinstance(result, NamedAnswer):
        data = result.data
        if result.fit:
            console.print(result.fit["words"], style="bold", markup=False)
        console.print(answer_report(data, title, max_rows=top, verbose=verbose))
        page = partial(plan_page, data, title, outputs.command)
    else:
        if not any(isinstance(result, NamedAnswer) for _, result in answers):
            reasons = "; ".join(f"{name}: {result}" for name, result in answers)
            raise NoFeasiblePlanError(f"nothing fits on any of {len(answers)} clusters. {reasons}")
        columns = [(name, given.data if isinstance(given, NamedAnswer) else _reason(given)) for name, given in answers]
        console.print(clusters_report(columns, title))
        data = {"clusters": {name: {"error": of} if isinstance(of, str) else of for name, of in columns}}
        page = partial(plans_page, columns, title, outputs.command)
    if outputs.json is not None:
        write(outputs.json, json.dumps(data, allow_nan=False) + "\n")
        _note(outputs.json, "the answer as data")
    if outputs.html is not None:
        write(outputs.html, page())
        _note(outputs.html, "the answer as a page")
    if outputs.save is not None and isinstance(result, NamedAnswer):  # of one cluster: see `Outputs.check`
        _save(result.plan, data, outputs.save)


def _reason(error: AtorchError) -> str:
    """The reason why there is no plan, short enough for a column."""
    if isinstance(error, NoFeasiblePlanError) and error.rejected and "short_bytes" in error.rejected[0]:
        return f"nothing fits: the nearest miss is {format_bytes(error.rejected[0]['short_bytes'])} short"
    return str(error)


def _save(plan: ClusterPlan, data: Mapping[str, Any], path: Path) -> None:
    """Write the chosen strategy with the plan, without the columns of all candidates."""
    report = {name: value for name, value in data.items() if name != "candidates"}
    replace(plan.strategy, metadata={"report": report}).save(path)
    _note(path, f"the choice, {plan.strategy}, for load_strategy")


def _note(path: Path, what: str) -> None:
    typer.echo(f"Wrote {path}: {what}")
