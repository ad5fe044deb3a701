"""ddp: every process holds the full model and sees different samples; gradients are averaged while backward runs.

Memory: parameters, gradients and optimizer states are full everywhere. Communication per step: an all-reduce of the
gradients over the processes that hold the same parameters, all but the last bucket overlapped with backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import Self

from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES, share_buffers
from atorch.cost.parallelism import replicate as replica_cost
from atorch.cost.state import in_buckets
from atorch.units import MiB

if TYPE_CHECKING:
    from atorch.auto.context import Built, Context


@method("ddp", phase=Phase.SHARD, slot="data_parallel")
class Ddp(Method):
    """Replicate the model over the processes that see different samples, or other tokens of them."""

    needs_replicas: ClassVar[bool] = True

    find_unused_parameters: bool = False
    """Look for parameters that a forward pass did not use; also auto_accelerate's argument of this name."""
    static_graph: bool = False
    """Every step uses the same parameters in the same way, as with reentrant checkpointing of shared modules."""
    bucket_cap_mb: int = Field(default=25, ge=1)
    """Size of the buckets that are reduced at once, in MiB."""

    @property
    def spans_blocks(self) -> bool:
        return True  # its buckets do

    def cost(self, cost: Cost) -> Cost:
        """An all-reduce of the gradients by bucket, with only the last one exposed; a broadcast of buffers."""
        cost = in_buckets(share_buffers(cost), cost.size(*REPLICA_AXES))
        return replica_cost(cost, bucket_bytes=self.bucket_cap_mb * MiB)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        if cluster.world_size > 1:
            yield cls()

    def apply(self, ctx: Context) -> Context:
        from atorch.runtime.data_parallel.replicate import replicate

        group = ctx.need_mesh().group(*REPLICA_AXES)
        ctx.give_memory()
        parts = tuple(
            replicate(
                part,
                group,
                ctx.device,
                find_unused_parameters=looks_for_unused(ctx, self.find_unused_parameters),
                static_graph=self.static_graph,
                bucket_cap_mb=self.bucket_cap_mb,
            )
            for part in ctx.parts
        )
        return replace(ctx, parts=parts).with_finish(averages_before_steps)


def looks_for_unused(ctx: Context, is_asked: bool = False) -> bool:
    """True if DDP should look for unused parameters; never if the loss function runs backward in parts, later."""
    return (is_asked or ctx.find_unused_parameters) and not any(method.defers_backward for method in ctx.strategy)


def averages_before_steps(built: Built) -> Built:
    """Average gradients that were assigned by hand before the optimizer steps."""
    from atorch.runtime.data_parallel.replicate import average_before_steps

    average_before_steps(built.optim, built.parts)
    return built
