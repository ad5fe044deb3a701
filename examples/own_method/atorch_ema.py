"""ema: an exponential moving average of the weights, which is often a better model than the last step's.

Memory: one fp32 copy of the trainable parameters that a process holds, so it shrinks as they are sharded.
Communication: none, because each process averages what it holds.
Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field

from atorch.auto.context import Built, Context
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cost import Cost


@method("ema", phase=Phase.STEP)
class Ema(Method):
    """Average the weights over the last `1 / (1 - decay)` steps or so."""

    exclusions: ClassVar[Mapping[str, str]] = {"chunk": "it moves parameters away between passes; use fsdp with ema"}

    decay: float = Field(default=0.99, gt=0, lt=1)
    """The share of the average that stays at each step."""

    def cost(self, cost: Cost) -> Cost:
        """One more fp32 number for each element of the optimizer's parameters, sharded as the gradients are."""
        return replace(cost, optim_itemsize=cost.optim_itemsize + 4.0 * cost.optim_shards / cost.grad_shards)

    def apply(self, ctx: Context) -> Context:
        """Update the average after each optimizer step; it becomes the model's attribute `average`."""

        def follow(built: Built) -> Built:
            average = Average([p for p in built.model.parameters() if p.requires_grad], self.decay)
            built.optim.register_step_post_hook(lambda *_: average.update())
            built.model.average = average
            return built

        return ctx.with_finish(follow)


class Average:
    """The moving average of some parameters, whole or sharded."""

    def __init__(self, parameters: list[torch.Tensor], decay: float) -> None:
        self.parameters, self.decay, self.num_updates = parameters, decay, 0
        self.values = [p.detach().float().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the parameters; the first steps are larger, so that the start soon loses its weight."""
        self.num_updates += 1
        decay = min(self.decay, self.num_updates / (self.num_updates + 10))
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.detach().float(), 1 - decay)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the average as the model's weights inside the `with` block."""
        kept = [p.detach().clone() for p in self.parameters]
        self._write(self.values)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
