"""`atorch visualize schedule`: draws a pipeline's schedule, on the terminal or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from atorch.cli.files import check_folders, write

app = typer.Typer(help="Draw what a strategy does.", rich_markup_mode=None, pretty_exceptions_enable=False)

Schedule = Annotated[
    Literal["gpipe", "1f1b", "interleaved", "zero_bubble"], typer.Option(help="As in pipeline_parallel.")
]
Stages = Annotated[int, typer.Option(min=1, help="Processes of the pipeline: the axis pipeline of parallel_mode.")]
MicroBatches = Annotated[int, typer.Option("--micro-batches", min=1, help="Parts of the batch of a step.")]
Pieces = Annotated[int | None, typer.Option(min=2, help="Stages of each process, for interleaved; 2 if not given.")]
Picture = Annotated[Path | None, typer.Option("--svg", dir_okay=False, help="Write a picture, instead of showing it.")]


@app.callback()
def _several() -> None:
    """One command so far, and still named."""


@app.command()
def schedule(
    schedule: Schedule = "1f1b",
    stages: Stages = 4,
    micro_batches: MicroBatches = 8,
    pieces: Pieces = None,
    svg: Picture = None,
) -> None:
    """Draw which process computes what when, from torch's own schedule, and tell how long processes wait.

    A forward pass takes one unit of time, a backward pass two; sending takes none.
    """
    check_folders(svg)

    from rich.console import Console

    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
    from atorch.report.schedule import schedule_svg, schedule_text
    from atorch.report.timeline import expected_bubble, timeline
    from atorch.runtime.pipeline.order import order

    method = PipelineParallel.of({"schedule": schedule, "interleave": pieces})
    drawn = timeline(order(schedule, stages, micro_batches, method.pieces))
    several = f" with {method.pieces} stages each" if method.pieces > 1 else ""
    batches = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    title = f"{schedule}: {stages} process{'es' * (stages > 1)}{several}, {batches}"
    expected = expected_bubble(schedule, stages, micro_batches, method.pieces)
    held = ", ".join(f"{drawn.most_held(process):g}" for process in range(stages))
    if svg is not None:
        write(svg, schedule_svg(drawn, f"{title}; {drawn.bubble:.1%} of the time is waiting"))
    else:
        console = Console(highlight=False)
        console.print(schedule_text(drawn, console.width))
    typer.echo(f"{title}: processes wait for {drawn.bubble:.1%} of the time (by formula {expected:.1%}), ", nl=False)
    typer.echo(f"and hold activations of {held} micro-batches")
