"""Output of answers: on the terminal, in the files that a command line requests, and a note on each file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

    console = Console(highlight=False)
    if len(answers) == 1 and isinstance(result := answers[0][1], NamedAnswer):
        from atorch.report.answer import answer_report

        data = result.data
        if result.fit:
            console.print(result.fit["words"], style="bold", markup=False)
        console.print(answer_report(data, title, max_rows=top, verbose=verbose))
        _write(result.plan, data, title, outputs)
        return
    from atorch.report.answer import beside_report

    columns = [(name, result.data if isinstance(result, NamedAnswer) else _reason(result)) for name, result in answers]
    _need_one(answers)
    console.print(beside_report(columns, title))
    if outputs.json is not None:
        plans = {name: {"error": answer} if isinstance(answer, str) else answer for name, answer in columns}
        _write_json(outputs.json, {"clusters": plans})
    if outputs.html is not None:
        from atorch.report.html import plans_page

        _write_page(outputs.html, plans_page(columns, title, outputs.command))


def _need_one(answers: Sequence[tuple[str, NamedAnswer | AtorchError]]) -> None:
    if not any(isinstance(result, NamedAnswer) for _, result in answers):
        reasons = "; ".join(f"{name}: {result}" for name, result in answers)
        raise NoFeasiblePlanError(f"nothing fits on any of {len(answers)} clusters. {reasons}")


def _reason(error: AtorchError) -> str:
    """The reason why there is no plan, short enough for a column."""
    if isinstance(error, NoFeasiblePlanError) and error.rejected and "short_bytes" in error.rejected[0]:
        return f"nothing fits: the nearest miss is {format_bytes(error.rejected[0]['short_bytes'])} short"
    return str(error)


def _write(plan: ClusterPlan, data: Mapping[str, Any], title: str, outputs: Outputs) -> None:
    if outputs.json is not None:
        _write_json(outputs.json, data)
    if outputs.html is not None:
        from atorch.report.html import plan_page

        _write_page(outputs.html, plan_page(data, title, outputs.command))
    if outputs.save is not None:
        _save(plan, data, outputs.save)


def _write_page(path: Path, page: str) -> None:
    write(path, page)
    _note(path, "the answer as a page")


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write(path, json.dumps(data, allow_nan=False) + "\n")
    _note(path, "the answer as data")


def _save(plan: ClusterPlan, data: Mapping[str, Any], path: Path) -> None:
    """Write the chosen strategy with the plan, without the columns of all candidates."""
    report = {name: value for name, value in data.items() if name != "candidates"}
    replace(plan.strategy, metadata={"report": report}).save(path)
    _note(path, f"the choice, {plan.strategy}, for load_strategy")


def _note(path: Path, what: str) -> None:
    typer.echo(f"Wrote {path}: {what}")
