"""chunk: parameters, gradients and optimizer states in chunks that move between device and host, under a byte budget.

Memory: at most the budget on the device, activations and workspace included; what is beyond it waits in host memory,
optimizer states first (Fang et al. 2021, arXiv 2108.05818). Chunks are sharded over the processes that hold the same
parameters, gathered before they are used and reduced after. Transfers: what waits is fetched for forward and for
backward, gradients go back, and the host steps what it holds. Planned for, and not applied yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.splits import shard

DEFAULT_FRACTION = 0.9


@method("chunk", phase=Phase.SHARD, slot="data_parallel")
class Chunk(Method):
    """Keep parameters, gradients and optimizer states within a budget of device memory."""

    budget_bytes: Annotated[int, Field(ge=1)] | None = None
    """What a device may hold at any moment, in bytes."""
    budget_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same as a fraction of the device's memory; None, and no bytes: 0.9."""
    hybrid: bool = True
    """Keep optimizer states for which the budget has room on the device, and step them there; off, the host holds and
    steps them all."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Chunks that are fetched ahead of their use; 0 waits for each."""
    disk: str | None = None
    """A folder for what host memory has no room for; None: host memory has to do."""

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.budget_bytes is not None and self.budget_fraction is not None:
            raise ValueError("budget_bytes and budget_fraction are both given; give one of them")
        return self

    def cost(self, cost: Cost) -> Cost:
        """Shards as under fsdp, gradients among them in chunks of their own, and a budget beyond which states wait."""
        low = cost.dtype != "float32"
        cost = shard(cost, itemsize=2.0 if low else cost.param_itemsize, overlap=0.8 if self.prefetch else 0.0)
        fraction = DEFAULT_FRACTION if self.budget_fraction is None else self.budget_fraction
        budget = fraction * cost.device_bytes if self.budget_bytes is None else float(self.budget_bytes)
        return cost.but(budget_bytes=budget, optim_offload=0.0 if self.hybrid else 1.0, grads_persist=True)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """With optimizer states where the budget has room, and without; a CPU's memory is the host's anyway."""
        if cluster.device.type != "cpu":
            yield cls()
            yield cls(hybrid=False)
