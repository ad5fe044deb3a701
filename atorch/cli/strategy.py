"""`atorch strategy show` and `convert`: prints strategy files, and converts them between their forms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from atorch.files import write

app = typer.Typer(help="Show and convert strategy files.", rich_markup_mode=None, pretty_exceptions_enable=False)

StrategyFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A strategy file.")]
FileFormat = Annotated[
    Literal["file", "list"],
    typer.Option("--to", help="file: versioned JSON, with the basis of the choice; list: what load_strategy takes."),
]
Verbose = Annotated[bool, typer.Option(help="Show all that the file holds.")]
StrategyOutput = Annotated[
    Path | None, typer.Option("--output", "-o", dir_okay=False, help="The file to write; without it, print.")
]


@app.command()
def show(file: StrategyFile, verbose: Verbose = False) -> None:
    """Print the methods of a strategy file, the knobs that are set, and the basis of the choice.

    With --verbose also all knobs, whole values, and the whole plan.
    """
    from rich.console import Console, Group
    from rich.text import Text

    from atorch.auto.strategy import Strategy
    from atorch.report.answer import answer_report, answer_summary
    from atorch.report.text import plan_report, plan_summary, table

    strategy = Strategy.of(file)
    rows = []
    for method in strategy:
        knobs = method.model_dump(exclude_defaults=not verbose)
        settings = ", ".join(f"{knob}={value!r}" for knob, value in knobs.items())
        rows.append((method.phase.name.lower(), method.name, settings))
    console = Console(highlight=False)
    console.print(table(str(file), ("phase", "method", "knobs"), rows))
    facts = [f"{key}: {value}" for key, value in strategy.metadata.items() if key != "report"]
    overflow: Literal["fold", "ellipsis"] = "fold" if verbose else "ellipsis"
    console.print(Group(*(Text(fact, no_wrap=not verbose, overflow=overflow) for fact in facts)))
    report = strategy.report
    if report and "cluster" in report:
        console.print(answer_report(report, verbose=True) if verbose else answer_summary(report))
    elif report:
        console.print(plan_report(report, max_rows=None) if verbose else plan_summary(report))


@app.command()
def convert(file: StrategyFile, to: FileFormat, output: StrategyOutput = None) -> None:
    """Write a strategy file as versioned JSON, or as a list of methods. FILE may have either form."""
    from atorch.auto.strategy import Strategy
    from atorch.report.figures import as_list

    strategy = Strategy.of(file)
    if output is not None and to == "file":
        strategy.save(output)
        return
    text = strategy.to_json() if to == "file" else as_list(strategy.to_list())
    if output is None:
        typer.echo(text, nl=False)
    else:
        write(output, text)
