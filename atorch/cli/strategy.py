"""`atorch strategy show` and `convert`: strategy files, for people and from one form to the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atorch.cli.files import write

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

app = typer.Typer(help="Show and convert strategy files.", rich_markup_mode=None, pretty_exceptions_enable=False)

StrategyFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A strategy file.")]
Form = Annotated[
    Literal["file", "list"],
    typer.Option("--to", help="file: versioned JSON, with what it was chosen by; list: what load_strategy takes."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", dir_okay=False, help="Where to write; else it is shown.")
]


@app.command()
def show(file: StrategyFile) -> None:
    """Print the methods of a strategy file, their knobs, and what it was chosen by."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atorch.auto.strategy import Strategy
    from atorch.report.answer import answer_report
    from atorch.report.text import plan_report

    strategy = Strategy.of(file)
    methods = Table("phase", "method", "knobs", title=escape(str(file)), title_justify="left")
    for method in strategy:
        knobs = ", ".join(f"{knob}={value!r}" for knob, value in method.model_dump().items())
        methods.add_row(method.phase.name.lower(), method.name, escape(knobs))
    console = Console()
    console.print(methods)
    facts = {key: value for key, value in strategy.metadata.items() if key != "report"}
    if facts:
        metadata = Table(title="chosen by", title_justify="left", show_header=False)
        for key, value in facts.items():
            metadata.add_row(escape(key), escape(str(value)))
        console.print(metadata)
    if strategy.report:
        console.print(answer_report(strategy.report) if "cluster" in strategy.report else plan_report(strategy.report))


@app.command()
def convert(file: StrategyFile, to: Form, output: Output = None) -> None:
    """Write a strategy file as versioned JSON, or as a list of methods; either can be read from either."""
    from atorch.auto.strategy import Strategy

    strategy = Strategy.of(file)
    if output is not None and to == "file":
        strategy.save(output)
        return
    text = strategy.to_json() if to == "file" else as_list(strategy)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write(output, text)


def as_list(strategy: Strategy) -> str:
    """JSON as a person would write it: names, and pairs of a name and the knobs that were set."""
    items = [
        json.dumps([each.name, knobs] if knobs else each.name, ensure_ascii=False)
        for each in strategy
        for knobs in [each.model_dump(mode="json", exclude_unset=True)]
    ]
    listed = ",\n  ".join(items)
    return f"[\n  {listed}\n]\n" if items else "[]\n"
