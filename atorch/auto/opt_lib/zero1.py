"""zero1: ddp, but each process keeps only the optimizer states of its own share of the parameters.

Memory: optimizer states (and fp32 masters) / (data × zero × sequence × context). An optimizer that is not element-wise
gets full parameters, distributed as evenly as possible.
Communication per step: ddp's all-reduce of the gradients, then every updated parameter once: all-gathered from its
shards, or broadcast by its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import Self

from atorch.auto.opt_lib.ddp import averages_before_steps, looks_for_unused
from atorch.auto.opt_lib.shared.backends import check, deepspeed, fairscale_states, in_pipeline, named
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same, replicas
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.compat import need_backend
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES, shard_optimizer, share_buffers
from atorch.cost.state import in_buckets

if TYPE_CHECKING:
    from atorch.auto.context import Context


@method("zero1", phase=Phase.SHARD, slot="data_parallel")
class Zero1(Method):
    """Shard optimizer states over the processes that hold the same parameters."""

    needs_replicas: ClassVar[bool] = True

    backend: Literal["torch", "fairscale", "deepspeed"] = "torch"
    """The implementation: this package's, FairScale's OSS, or DeepSpeed's stage 1."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept the documented `{"use_ds_zero": True}`, too, which means `{"backend": "deepspeed"}`."""
        return super().of(named(cls.name, config, {"use_ds_zero": "deepspeed"}))

    def unmet(self, cluster: ClusterSpec) -> str | None:
        if self.backend != "torch":
            need_backend(self.backend)
        return None

    @property
    def engine(self) -> str:
        return "" if self.backend == "torch" else self.backend

    @property
    def spans_blocks(self) -> bool:
        return True  # its shards do

    def cost(self, cost: Cost) -> Cost:
        """This device's share of the optimizer states; ddp's all-reduce, and every parameter once from its owner."""
        cost = in_buckets(share_buffers(cost), cost.size(*REPLICA_AXES))
        is_cut = cost.optim_is_elementwise and self.backend == "torch"
        return shard_optimizer(cost, reduces="all_reduce", gathers="sliced" if is_cut else "broadcast")

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        if cluster.world_size > 1 and profile.optim_state_per_param > 0:
            yield cls()

    def check_optimizer(self, ctx: Context) -> None:
        if replicas(ctx) > 1:
            need_same(ctx, self.name, "flat" if self.backend == "deepspeed" else "apart")

    def check(self, ctx: Context) -> None:
        check(ctx, self.name, self.backend)

    def apply(self, ctx: Context) -> Context:
        """Wrap every part as ddp does, and the optimizer; DeepSpeed wraps both once they are built."""
        from atorch.runtime.data_parallel.replicate import replicate
        from atorch.runtime.data_parallel.zero1 import ShardedOptimizer

        self.check(ctx)
        if self.backend == "deepspeed":
            if in_pipeline(ctx.strategy):
                return replace(ctx)  # the pipeline's engine shards the states
            return deepspeed(ctx, self.name, stage=1)
        group = ctx.need_mesh().group(*REPLICA_AXES)
        ctx.give_memory()
        parts = tuple(
            replicate(part, group, ctx.device, find_unused_parameters=looks_for_unused(ctx)) for part in ctx.parts
        )
        if self.backend == "fairscale":
            return fairscale_states(replace(ctx, parts=parts), group)
        ctx, inner = replace(ctx, parts=parts).with_finish(averages_before_steps), ctx.make_optimizer
        if inner is None or group.size() == 1:
            return ctx
        return replace(ctx, make_optimizer=lambda groups: ShardedOptimizer(groups, inner, group, is_agreed=True))
