"""A loss of all micro-batches together, where it is no weighted sum of theirs: contrastive losses, rankings, medians.

Each micro-batch gives the schedule a scalar whose backward continues that of the full-batch loss. The first backward
comes after all forward passes (GPipe), and computes the loss once, on the merged outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atorch.model.pytree import map_tensors
from atorch.model.user_functions import LossFunc
from atorch.runtime.data.batch_split import merge
from atorch.runtime.loss.loss_value import value_of


class Gathered:
    """Collects the outputs of `count` micro-batches of `batch`; after backward, `loss` is the loss of all."""

    def __init__(self, batch: Any, loss_func: LossFunc, count: int) -> None:
        self._batch, self._loss_func, self._count = batch, loss_func, count
        self._outputs: list[Any] = []
        self._leaves: list[list[Tensor]] = []
        self.loss: Any = None

    def __call__(self, number: int, output: Any) -> Tensor:
        """A stand-in for the loss of micro-batch `number`."""
        tensors: list[Tensor] = []
        leaves: list[Tensor] = []

        def detach(leaf: Tensor) -> Tensor:
            detached = leaf.detach().requires_grad_(leaf.requires_grad)
            if leaf.requires_grad:
                tensors.append(leaf)
                leaves.append(detached)
            return detached

        self._outputs.append(map_tensors(detach, output))
        self._leaves.append(leaves)
        stand_in: Tensor = _Later.apply(self, number, *tensors)  # type: ignore[no-untyped-call]
        return stand_in

    def gradients(self, number: int) -> Sequence[Tensor | None]:
        """The gradients of the full-batch loss with respect to the outputs of a micro-batch."""
        if self.loss is None:
            with torch.enable_grad():
                output = merge(self._outputs, [1.0 / self._count] * self._count)
                loss = self._loss_func(self._batch, output)
                value_of(loss).backward()
            self.loss = map_tensors(Tensor.detach, loss)
        return [leaf.grad for leaf in self._leaves[number]]


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gathered: Gathered, number: int, *tensors: Tensor) -> Tensor:
        ctx.gathered, ctx.number = gathered, number
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.gathered.gradients(ctx.number)
