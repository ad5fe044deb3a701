"""`atorch strategy show`: a strategy file, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at strategy files.", rich_markup_mode=None, pretty_exceptions_enable=False)

StrategyFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A strategy file.")]


@app.callback()
def _group() -> None:
    # With a callback `show` stays a command of its own; typer makes a lone command the whole group otherwise.
    pass


@app.command()
def show(file: StrategyFile) -> None:
    """Print the methods of a strategy file, their knobs, and what it was chosen by."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from atorch.auto.strategy import Strategy
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
        console.print(plan_report(strategy.report))
