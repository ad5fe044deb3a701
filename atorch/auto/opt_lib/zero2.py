"""zero2: gradients and optimizer states sharded over the processes; parameters stay gathered until backward ends.

Memory: (gradients + optimizer states) / shards; parameters are full during a step, and sharded between steps.
Communication per step: one all-gather of the parameters and one reduce-scatter of the gradients. The default backend
is fsdp that keeps parameters after forward. The FairScale backend keeps full parameters and reduces each gradient to
one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.shared.backends import check, deepspeed, fairscale_gradients, named, needed_optimizer
from atorch.auto.opt_lib.shared.model_requirements import need_dense_gradients
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same, replicas
from atorch.auto.strategy.method import Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.compat import need_backend
from atorch.cost import Cost
from atorch.cost.parallelism import REPLICA_AXES, shard_optimizer

if TYPE_CHECKING:
    from atorch.auto.context import Context


@method("zero2", phase=Phase.SHARD, slot="data_parallel")
class Zero2(Fsdp):
    """Shard gradients and optimizer states."""

    backend: Literal["fsdp", "fairscale", "deepspeed"] = "fsdp"
    """The implementation: fsdp with all its knobs, FairScale's ShardedDataParallel, or DeepSpeed's stage 2."""
    reshard_after_forward: bool | int | None = False
    """False: keep gathered parameters for backward. A number keeps them over that many processes."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept `{"not_use_fsdp": True}` (FairScale) and `{"use_ds_zero": True}` (DeepSpeed), too."""
        flags = {"not_use_fsdp": "fairscale", "use_ds_zero": "deepspeed"}
        return super().of(named(cls.name, config, flags))

    @model_validator(mode="after")
    def _keeps_parameters(self) -> Self:
        if self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD") or self.reshard_after_forward is True:
            raise ValueError("zero2 keeps parameters for backward; use fsdp to free them after forward")
        other = self.model_fields_set - {"backend"}
        if self.backend != "fsdp" and other:
            raise ValueError(f"{', '.join(sorted(other))} are fsdp's; the {self.backend} backend has no knobs")
        return self

    def unmet(self, cluster: ClusterSpec) -> str | None:
        if self.backend != "fsdp":
            need_backend(self.backend)
        return None

    @property
    def engine(self) -> str:
        return "" if self.backend == "fsdp" else self.backend

    def cost(self, cost: Cost) -> Cost:
        """The cost of fsdp with kept parameters; other backends have full ones and reduce a gradient to its owner.

        DeepSpeed itself all-reduces them (zero/stage_1_and_2.py, `allreduce_and_scatter`) in every micro-batch.
        """
        if cost.keeps_whole:
            cost = shard_optimizer(cost, reduces="all_reduce", per_micro_batch=True)
        elif self.backend == "fsdp":
            return super().cost(cost)
        else:
            cost = shard_optimizer(cost, gathers="broadcast" if self.backend == "fairscale" else "all_gather")
        return cost.replace(grad_shards=cost.grad_shards * cost.size(*REPLICA_AXES))

    def check_optimizer(self, ctx: Context) -> None:
        if self.backend == "fsdp":
            super().check_optimizer(ctx)
        elif replicas(ctx) > 1:
            need_same(ctx, self.name, "flat" if self.backend == "deepspeed" else "apart")

    def check(self, ctx: Context) -> None:
        if self.backend == "fsdp":
            super().check(ctx)
        else:
            needed_optimizer(ctx, self.name)
            check(ctx, self.name, self.backend)
            need_dense_gradients(ctx, self.name)

    def apply(self, ctx: Context) -> Context:
        """Shard every part in place, or leave model and optimizer to the backend once they are built."""
        self.check(ctx)
        if self.backend == "deepspeed":
            return deepspeed(ctx, self.name, stage=2)
        if self.backend == "fairscale":
            return fairscale_gradients(ctx, self.name, ctx.need_mesh().group(*REPLICA_AXES))
        return super().apply(ctx)
