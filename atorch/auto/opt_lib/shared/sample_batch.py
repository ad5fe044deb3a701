"""Runs of a model on a few samples, for methods that watch it before they change anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from atorch.auto.context import Context
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.pytree import batch_size, map_tensors, tensors_in
from atorch.runtime.data.batches import take

# Unlike usual numbers of processes, heads or features, so that a size identifies its dim.
SAMPLES = 3
TOKENS = 11

# Errors of models that do not accept so few tokens.
_TOO_SHORT = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, ZeroDivisionError)


def on_samples(ctx: Context, name: str) -> Callable[[nn.Module], Any]:
    """A function that calls a model on the first samples of `ctx.sample_batch`, on the model's device.

    If the model fails on these, it gets the whole batch: edges of a graph, for example, refer to all nodes.

    Raises:
        ArgumentError: there is no batch for the method `name`.
    """
    return _on_smallest(ctx, name, [_few_samples])


def on_few_tokens(ctx: Context, name: str) -> Callable[[nn.Module], Any]:
    """A function like that of `on_samples`, with a few tokens of each sequence if the model accepts so few.

    Raises:
        ArgumentError: there is no batch for the method `name`.
    """
    return _on_smallest(ctx, name, [lambda batch: with_few_tokens(_few_samples(batch)), _few_samples])


def _on_smallest(ctx: Context, name: str, parts: list[Callable[[Any], Any]]) -> Callable[[nn.Module], Any]:
    if ctx.sample_batch is None:
        raise ArgumentError(f"{name} runs the model on a sample before it splits it; give a dataset, or a sample_batch")
    parts = [*parts, lambda batch: batch]

    def run(model: nn.Module) -> Any:
        batch = ctx.prepare_input(ctx.sample_batch, next(model.parameters()).device)
        while True:
            try:
                output = ctx.call_model(model, parts[0](batch))
            except _TOO_SHORT as error:
                if len(parts) == 1:
                    raise
                logger.info("%s observes more of the batch, since on a part of it: %s", name, error)
                del parts[0]
            else:
                del parts[1:]  # later calls take the same part
                return output

    return run


def with_few_tokens(batch: Any) -> Any:
    """The batch with `TOKENS` adjacent tokens of each sequence: the first or the last, whichever are more diverse.

    Sequences are integers of shape (samples, tokens). Every other dim of the same length is cut alike, as in masks and
    labels. One end of a sequence may be padding, which the choice avoids.
    """
    sequences: dict[int, list[Tensor]] = {}
    for tensor in tensors_in(batch):
        if tensor.dim() == 2 and tensor.shape[1] > TOKENS and not (tensor.is_floating_point() or tensor.is_complex()):
            sequences.setdefault(tensor.shape[1], []).append(tensor)
    starts = {
        length: max((0, length - TOKENS), key=lambda start: sum(_num_different(tokens, start) for tokens in tensors))
        for length, tensors in sequences.items()
    }

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] in starts:
                tensor = tensor.narrow(dim, starts[tensor.shape[dim]], TOKENS)
        return tensor

    return map_tensors(cut, batch)


def _num_different(tokens: Tensor, start: int) -> int:
    return int(tokens.narrow(1, start, TOKENS).unique().numel())


def _few_samples(batch: Any) -> Any:
    return take(batch, 0, SAMPLES, batch_size(batch))
