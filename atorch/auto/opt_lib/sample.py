"""A model at work on a few samples, for methods that watch it before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from atorch.auto.context import Context
from atorch.errors import ArgumentError
from atorch.profiler.tensors import batch_size
from atorch.runtime.split import take

SAMPLES = 3  # no usual number of processes, heads or tokens, so that sizes tell


def on_samples(ctx: Context, name: str) -> Callable[[nn.Module], Any]:
    """A function that calls a model on the first samples of `ctx.sample_batch`, on the device where the model is.

    Raises:
        ArgumentError: there is no batch for the method `name`.
    """
    if ctx.sample_batch is None:
        raise ArgumentError(f"{name} watches the model at work before it splits it; give a dataset, or a sample_batch")

    def run(model: nn.Module) -> Any:
        batch = ctx.prepare_input(ctx.sample_batch, next(model.parameters()).device)
        return ctx.call_model(model, take(batch, 0, SAMPLES, batch_size(batch)))

    return run
