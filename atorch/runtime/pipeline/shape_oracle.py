"""Stands in for the other processes of a pipeline, where these are not there: in a world of fakes.

A stage must know the shapes that earlier stages send, and every process gets the loss from the last one. In a
simulation nobody is there to tell. Then an understudy does: the whole model in one piece, on fake tensors, which take
no memory, with all done to it that was done to the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from atorch.model.state import untouched
from atorch.runtime.data_parallel.gradient_sync import Reduction
from atorch.runtime.pipeline.capture.shapes import TensorSpec
from atorch.runtime.pipeline.stage import stage_of

ObservedCalls = tuple[Sequence[Sequence[TensorSpec]], Any]
"""The shapes of what each call of a model's units returns, and the model's output."""


class ShapeOracle:
    """`part` is a stage made by `stage.cut` that has all calls of the model."""

    def __init__(self, part: nn.Module) -> None:
        self._part, self._stage, self._reduction = part, stage_of(part), Reduction(part)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that it holds, and no process of the pipeline does."""
        yield from self._part.parameters()
        yield from self._part.buffers()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedCalls:
        part = self._part
        with torch.no_grad(), untouched(part), self._reduction.forward(), self._stage.visit((), ()) as visit:
            output = part(*args, **kwargs)
        return visit.made, output
