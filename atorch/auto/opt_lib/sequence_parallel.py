"""sequence_parallel: each process holds a part of every sequence, and attention sees the full sequence.

ulysses, over its own axis: tokens are split everywhere. Around attention they are exchanged for heads, by four
all-to-alls in forward and in backward (Jacobs et al. 2023, arXiv 2309.14509). Memory: activations / sequence; full
parameters.
megatron, over the axis of tensor_parallel: norms and residual streams, which tensor_parallel leaves full, are split by
tokens. Its all-reduces become reduce-scatters and all-gathers (Korthikanti et al. 2022, arXiv 2205.05198).
A run on a few samples shows which tensors of a block have a token dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import Self

from atorch.auto.opt_lib.shared.model_requirements import (
    indivisible,
    on_samples,
    uncuttable,
    unmet_tokens,
    with_split_tokens,
)
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import split_sequence, whole_outside
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from atorch.auto.context import Context
    from atorch.runtime.tensor_parallel import ModelLayout


@method("sequence_parallel", phase=Phase.TENSOR)
class SequenceParallel(Method):
    """Split activations by tokens."""

    needs_values: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = True

    mode: Literal["ulysses", "megatron"] = "ulysses"
    """ulysses splits any model over the axis sequence; megatron, over tensor, what tensor_parallel leaves full."""

    @property
    def splits(self) -> tuple[str, ...]:
        return ("sequence",) if self.mode == "ulysses" else ()

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.mode == "ulysses" else ("tensor_parallel",)

    def unfit(self, cost: Cost) -> str | None:
        """Require tokens that divide evenly; for ulysses also heads, over tensor × sequence, and fused attention."""
        if self.mode == "megatron":
            return uncuttable(cost.segments, cost.size("tensor", "context"), str(self))
        reason = unmet_tokens(cost) if cost.size("sequence") > 1 else None
        reason = reason or indivisible(cost.segments, cost.size("tensor", "sequence"), "tensor × sequence")
        return reason or uncuttable(cost.segments, cost.size("sequence", "context"), self.name)

    def cost(self, cost: Cost) -> Cost:
        if self.mode == "megatron":
            splits = cost.size("tensor") > 1
            return cost.replace(splits_norms=splits, held_gathers=2.0 * splits)  # before attention, and before the MLP
        return whole_outside(split_sequence(cost))

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        if cluster.world_size > 1 and any(block.num_heads > 1 for block in profile.blocks):
            yield cls(mode="ulysses")
            yield cls(mode="megatron")

    def check(self, ctx: Context) -> None:
        for name in self.needs:
            if name not in ctx.strategy.names():
                raise StrategyError(
                    f"{self} completes {name}, which is not in the strategy; add {name} and an axis for it, or take "
                    "the mode ulysses with an axis sequence in parallel_mode"
                )

    def apply(self, ctx: Context) -> Context:
        """Split activations through the model's blocks in place; megatron does so later, in `complete`.

        Raises:
            StrategyError: a block cannot be split; names the module that prevents it. The model is unchanged.
            ArgumentError: there is no sample batch.
        """
        from atorch.distributed.collectives import all_or_none
        from atorch.runtime.sequence_parallel import TokenPartition, Ulysses, check_tokens

        mesh = ctx.need_mesh()
        self.check(ctx)
        if self.mode == "megatron":
            if mesh.size("tensor") > 1:
                group = mesh.group("tensor")
                all_or_none(lambda: check_tokens(ctx.parts[0], on_samples(ctx, self.name), group))
            return ctx
        is_split = mesh.size("context") > 1 and ctx.strategy.splits_over("context")
        if mesh.size("sequence") == 1 or is_split:  # context_parallel splits over both axes
            return ctx
        group = mesh.group("sequence")
        return with_split_tokens(ctx, self.name, TokenPartition(group), Ulysses(group))

    def complete(self, ctx: Context, layout: ModelLayout) -> None:
        """Split by tokens what `layout` leaves full of the context's model, if the mode is megatron.

        Raises:
            StrategyError: a block does not compute the same.
        """
        from atorch.runtime.sequence_parallel import split_between

        if self.mode == "megatron":
            (model,) = ctx.parts
            split_between(model, layout.blocks, on_samples(ctx, self.name), ctx.need_mesh().group("tensor"))
