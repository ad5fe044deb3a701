"""Replaces the other processes of a pipeline in a fake world.

A stage must know the shapes that earlier stages send, and every process gets the loss from the last one. A simulation
has no other processes, so the oracle computes both: it is the full model in one piece, on fake tensors, which take no
memory, with the same strategy applied as to the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from atorch.model.state import preserved_state
from atorch.runtime.data_parallel.gradient_sync import Reduction
from atorch.runtime.pipeline.capture.shapes import TensorSpec
from atorch.runtime.pipeline.stage import stage_of

ObservedCalls = tuple[Sequence[Sequence[TensorSpec]], Any]
"""The shapes that each call of a model's units returns, and the model's output."""


class ShapeOracle:
    """Runs `part`, a stage made by `stage.cut` that has all calls of the model."""

    def __init__(self, part: nn.Module) -> None:
        self._part, self._stage, self._reduction = part, stage_of(part), Reduction(part)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The oracle's tensors, which no process of the pipeline holds."""
        yield from self._part.parameters()
        yield from self._part.buffers()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedCalls:
        part = self._part
        with torch.no_grad(), preserved_state(part), self._reduction.forward(), self._stage.visit((), ()) as visit:
            output = part(*args, **kwargs)
        return visit.made, output
