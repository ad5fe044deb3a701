"""context_parallel: each process holds a part of every sequence, and keys and values pass around a ring.

Memory: activations / context; parameters stay full. Communication per block: context − 1 hops of keys and values in
forward, and twice as many in backward with their gradients. Attention overlaps them (Liu et al. 2023, arXiv
2310.01889). That is (3 + recomputed) · (context − 1) sends of 2 · batch · tokens / context · key width elements. It
suits sequences that need more processes than sequence_parallel has heads for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import Self

from atorch.auto.opt_lib.parallel_mode import ParallelMode, size_of
from atorch.auto.opt_lib.shared.model_requirements import uncuttable, unmet_tokens, with_split_tokens
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import split_context, whole_outside
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from atorch.auto.context import Context
    from atorch.distributed.mesh import Mesh
    from atorch.runtime.sequence_parallel import Exchange


@method("context_parallel", phase=Phase.TENSOR)
class ContextParallel(Method):
    """Split sequences over the axis `context`, with attention around a ring."""

    needs_values: ClassVar[bool] = True
    needs_sample: ClassVar[bool] = True

    load_balance: bool = True
    """Give each process one piece from the front of the sequence and one from its back. A causal mask then leaves all
    of them equal work. If False, pieces are in order, and the last process has almost twice its share."""

    @property
    def splits(self) -> tuple[str, ...]:
        return ("context",)

    def unfit(self, cost: Cost) -> str | None:
        """Require fused attention, and sequences that divide into one piece a rank, two with load balance."""
        pieces = cost.size("context", "sequence") * (2 if self.load_balance else 1)
        reason = unmet_tokens(cost) if cost.size("context") > 1 else None
        return reason or uncuttable(cost.segments, pieces, self.name)

    def cost(self, cost: Cost) -> Cost:
        """The split. Without load balance, the last of c ranks has (2 c - 1) / c² of a causal triangle, not 1 / c."""
        cost = whole_outside(split_context(cost))
        return cost if self.load_balance else cost.replace(attention_load=2.0 - 1.0 / cost.context)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        if cluster.world_size > 1 and any(block.attention_flops and block.sequence_length for block in profile.blocks):
            yield cls()

    def check(self, ctx: Context) -> None:
        from atorch.distributed.mesh import Mesh

        strategy, mode = ctx.strategy, ctx.strategy.get(ParallelMode)
        if size_of(ctx, "context") == 1:
            return
        by_sequence = size_of(ctx, "sequence") > 1 and strategy.splits_over("sequence")
        if by_sequence and mode is not None:
            _need_neighbours(Mesh(mode.slices, mode.rank_order, ctx.device.type))

    def apply(self, ctx: Context) -> Context:
        """Split activations through the model's blocks in place, with ring attention.

        Combined with sequence_parallel (ulysses), it splits over both axes.

        Raises:
            StrategyError: a block cannot be split, a ring does not support its attention, or the axis sequence does not
                come before context. The model is unchanged.
            ArgumentError: there is no sample batch.
        """
        from atorch.distributed.collectives import all_or_none
        from atorch.runtime.context_parallel import RingExchange, UlyssesRing
        from atorch.runtime.sequence_parallel import TokenPartition

        mesh = ctx.need_mesh()
        if mesh.size("context") == 1:
            return ctx
        group = mesh.group("context")
        exchange: Exchange = RingExchange(group, load_balance=self.load_balance)
        if mesh.size("sequence") > 1 and ctx.strategy.splits_over("sequence"):
            all_or_none(lambda: _need_neighbours(mesh))
            exchange = UlyssesRing(mesh.group("sequence"), group, load_balance=self.load_balance)
            group = mesh.group("context", "sequence")
        return with_split_tokens(ctx, self.name, TokenPartition(group, self.load_balance), exchange)


def _need_neighbours(mesh: Mesh) -> None:
    """Raise if ranks along sequence are not neighbours in the product of context and sequence."""
    inner = mesh.size("sequence")
    if mesh.rank("context", "sequence") != mesh.rank("context") * inner + mesh.rank("sequence"):
        names = ", ".join(name for name, size in mesh.slices if size > 1)
        raise StrategyError(
            f"parallel_mode has the axes in the order {names}, in which context_parallel does not find the ranks along "
            "sequence side by side; give sequence before context"
        )
