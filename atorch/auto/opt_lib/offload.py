"""offload: shares of parameters, optimizer states and activations wait in host memory.

Memory: that share of each. Transfers over the host link, per step: of parameters, every gather of theirs and their
gradients back; of optimizer states that are stepped on the host, gradients down and parameters up (Ren et al. 2021,
arXiv 2101.06840); of activations, down in forward and up in backward. For who needs less than chunk, which keeps to a
budget. Planned for, and not applied yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile

Share = Annotated[float, Field(ge=0, le=1)]


@method("offload", phase=Phase.SHARD)
class Offload(Method):
    """Keep shares of a step's state in host memory."""

    parameters: Share = 0.0
    """Of the parameters and their gradients."""
    optimizer: Share = 1.0
    """Of the optimizer states, and of fp32 masters; the host steps what it holds."""
    activations: Share = 0.0
    """Of what is saved for backward."""

    @model_validator(mode="after")
    def _hold(self) -> Self:
        if self.parameters > self.optimizer:
            raise ValueError(
                f"parameters is {self.parameters:g} and optimizer {self.optimizer:g}: parameters that wait on the host "
                "are stepped there, so give optimizer at least as much"
            )
        if not (self.optimizer or self.activations):
            raise ValueError("all shares are 0, which offloads nothing; leave offload out")
        return self

    def unfit(self, cost: Cost) -> str | None:
        """Under chunk's budget it is chunk that decides which states wait; activations are no business of it."""
        if cost.budget_bytes < math.inf and (self.parameters or self.optimizer):
            return "chunk decides which states wait in host memory; offload activations alone beside it"
        return None

    def cost(self, cost: Cost) -> Cost:
        """The shares; what moves follows from them. Two blocks' activations stay: one computes, one is on its way."""
        blocks = cost.num_blocks / cost.stages
        return cost.but(
            param_offload=self.parameters,
            optim_offload=self.optimizer,
            activation_offload=self.activations * max(0.0, 1.0 - 2.0 / max(1.0, blocks)),
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """Optimizer states, parameters as well, activations, and all; a CPU's memory is the host's anyway."""
        if cluster.device.type == "cpu":
            return
        yield cls()
        yield cls(parameters=1.0)
        yield cls(optimizer=0.0, activations=1.0)
        yield cls(parameters=1.0, activations=1.0)
