"""`atorch checkpoint`: prints what checkpoints hold, verifies them, exports and converts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.checkpoint.reading import Checkpoint

app = typer.Typer(help="Show, verify and convert checkpoints.", rich_markup_mode=None, pretty_exceptions_enable=False)

CheckpointFolder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The folder of save_checkpoint.")]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step. [default: the newest]")]
AllTensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]


@app.command()
def show(folder: CheckpointFolder, step: Step = None, tensors: AllTensors = False) -> None:
    """Print the steps in a folder, and the contents of one checkpoint."""
    from atorch.checkpoint.commit import steps
    from atorch.checkpoint.reading import Checkpoint

    typer.echo(f"steps: {', '.join(map(str, steps(folder))) or 'none'}")
    with Checkpoint.open(folder, step) as checkpoint:
        typer.echo(f"step {checkpoint.step}, saved by {checkpoint.world_size} processes")
        for kind in ("model", "optim"):
            sizes = [_num_bytes(checkpoint, name) for name in checkpoint.names if name.startswith(f"{kind}.")]
            typer.echo(f"{kind}: {len(sizes)} tensors, {format_bytes(sum(sizes))}")
        if "optim" in checkpoint.plain:
            typer.echo(f"optimizer: {checkpoint.plain['optim']['class']}")
        for name, (shape, dtype) in checkpoint.names.items() if tensors else ():
            typer.echo(f"{name}  {list(shape)}  {str(dtype).removeprefix('torch.')}")


@app.command()
def verify(folder: CheckpointFolder, step: Step = None) -> None:
    """Read a whole checkpoint, and compare it with its checksums. Status 2 if a file is damaged."""
    from atorch.checkpoint.reading import Checkpoint

    with Checkpoint.open(folder, step) as checkpoint:
        for name in checkpoint.names:
            checkpoint.read(name)
        for rank in range(checkpoint.world_size):
            checkpoint.by_rank(rank)
        num_bytes = sum(_num_bytes(checkpoint, name) for name in checkpoint.names)
        typer.echo(f"step {checkpoint.step} is whole: {len(checkpoint.names)} tensors, {format_bytes(num_bytes)}")


@app.command()
def export(
    folder: CheckpointFolder,
    path: Annotated[Path, typer.Argument(help="The new folder.")],
    step: Step = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, typer.Option(help="Of floating-point tensors. [default: as saved]")
    ] = None,
) -> None:
    """Write the model of a checkpoint in Hugging Face's format: safetensors files and a config."""
    from atorch.checkpoint.pretrained import export_model
    from atorch.checkpoint.reading import Checkpoint
    from atorch.checkpoint.shard_file import DTYPES

    with Checkpoint.open(folder, step) as checkpoint:
        export_model(checkpoint, path, None if dtype is None else DTYPES[dtype.upper().replace("FP", "F")])


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(exists=True, help="A folder of DCP, DeepSpeed, Accelerate or Hugging Face, or a .pt file.")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder that gets the checkpoint.")],
) -> None:
    """Convert another program's checkpoint, without running code from it."""
    from atorch.checkpoint.convert import convert

    path, left_out = convert(source, folder)
    typer.echo(path)
    if left_out:
        more = f", and {len(left_out) - 8} more" if len(left_out) > 8 else ""
        typer.echo(f"left out: {', '.join(left_out[:8])}{more}")


def _num_bytes(checkpoint: Checkpoint, name: str) -> int:
    shape, dtype = checkpoint.names[name]
    return dtype.itemsize * math.prod(shape)
