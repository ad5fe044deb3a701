"""`atorch visualize`: a pipeline's schedule, or a profile of chunked memory, on the terminal or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from atorch.errors import ArgumentError
from atorch.files import check_target, write


class _ProfileUnlessNamed(TyperGroup):
    """Treats `atorch visualize FILE` as `atorch visualize profile FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = ["profile", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ProfileUnlessNamed,
    help="Draw pipeline schedules and memory profiles. `visualize FILE` is `visualize profile FILE`.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ScheduleName = Annotated[
    Literal["gpipe", "1f1b", "interleaved", "zero_bubble"], typer.Option(help="As in pipeline_parallel.")
]
Stages = Annotated[int, typer.Option(min=1, help="Processes of the pipeline: the axis pipeline of parallel_mode.")]
MicroBatches = Annotated[int, typer.Option("--micro-batches", min=1, help="Parts of the batch of a step.")]
Pieces = Annotated[int | None, typer.Option(min=2, help="Stages of each process, for interleaved; 2 if not given.")]
Picture = Annotated[Path | None, typer.Option("--svg", dir_okay=False, help="Write a picture, instead of showing it.")]

ProfileFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file of profiler.save.")]
PictureKind = Annotated[
    Literal["memory", "access"], typer.Option(help="Bytes in use over time, or where each chunk is over time.")
]
MemoryType = Annotated[Literal["GPU", "CPU"], typer.Option(help="The device's memory or the host's, for memory.")]
PictureOutput = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="A name that ends in .png or .html. Without it, both, named after FILE."),
]


@app.command()
def schedule(
    schedule: ScheduleName = "1f1b",
    stages: Stages = 4,
    micro_batches: MicroBatches = 8,
    pieces: Pieces = None,
    svg: Picture = None,
) -> None:
    """Draw what each process computes at each time, from torch's own schedule, and print how long processes wait.

    A forward pass takes one unit of time, a backward pass two; sending takes none.
    """
    if svg is not None:
        check_target(svg)

    from rich.console import Console

    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
    from atorch.report.schedule import expected_bubble, schedule_svg, schedule_text, timeline
    from atorch.runtime.pipeline.schedules import order

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


@app.command()
def profile(
    profile: ProfileFile,
    fig_type: PictureKind = "memory",
    memory_type: MemoryType = "GPU",
    output: PictureOutput = None,
) -> None:
    """Draw a profile of chunked memory that PatrickStar's engine recorded.

    Phases are green (forward), blue (backward) and purple (optimizer). Memory: red is all that is in use, blue what
    chunks take. Access: red is on the device, blue on the host, with one row per chunk.
    """
    shows = f"{fig_type}_{memory_type}" if fig_type == "memory" else fig_type
    paths = (
        [output] if output else [profile.with_name(f"{profile.stem}_{shows}{suffix}") for suffix in (".png", ".html")]
    )
    if output and output.suffix not in (".png", ".html"):
        raise ArgumentError(f"--output is {str(output)!r}; it ends in .png for a picture, in .html for a page")
    if not profile.exists():
        raise ArgumentError(f"{str(profile)!r} is not an existing file; visualize takes a profile, or `schedule`")
    for path in paths:
        check_target(path)

    from atorch.patrickstar.pictures import draw
    from atorch.patrickstar.profiler import Profile

    drawing = draw(Profile.load(profile), fig_type, memory_type)
    for path in paths:
        write(path, drawing.png() if path.suffix == ".png" else drawing.page())
    typer.echo(drawing.said)
    for path in paths:
        typer.echo(f"  {path}")
