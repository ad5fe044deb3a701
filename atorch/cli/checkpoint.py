"""`atorch checkpoint show` and `verify`: prints what checkpoints hold, and reads them whole against their checksums."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.checkpoint.files import Checkpoint

app = typer.Typer(help="Show and verify checkpoints.", rich_markup_mode=None, pretty_exceptions_enable=False)

CheckpointFolder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="The folder that save_checkpoint was given.")
]
Step = Annotated[int | None, typer.Option(help="The checkpoint of this step. [default: the newest]")]
AllTensors = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]


@app.command()
def show(folder: CheckpointFolder, step: Step = None, tensors: AllTensors = False) -> None:
    """Print the steps in a folder, and what one checkpoint holds."""
    from atorch.checkpoint.files import Checkpoint, steps

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
    """Read a checkpoint whole, and compare it with its checksums. Status 2 if a file is damaged."""
    from atorch.checkpoint.files import Checkpoint

    with Checkpoint.open(folder, step) as checkpoint:
        for name in checkpoint.names:
            checkpoint.read(name)
        for rank in range(checkpoint.world_size):
            checkpoint.by_rank(rank)
        num_bytes = sum(_num_bytes(checkpoint, name) for name in checkpoint.names)
        typer.echo(f"step {checkpoint.step} is whole: {len(checkpoint.names)} tensors, {format_bytes(num_bytes)}")


def _num_bytes(checkpoint: Checkpoint, name: str) -> int:
    shape, dtype = checkpoint.names[name]
    return dtype.itemsize * math.prod(shape)
