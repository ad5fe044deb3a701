"""context_parallel: each process has a part of every sequence, and keys and values go round a ring.

Memory: activations / context; parameters stay whole. Communication per block: context − 1 hops of keys and values in
forward, twice that in backward with their gradients, behind the attention that they are needed for (Liu et al. 2023,
arXiv 2310.01889). For sequences longer than heads can share out. Planned for, and not applied yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from typing_extensions import Self

from atorch.auto.opt_lib.divisible import uncuttable
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.splits import split_context


@method("context_parallel", phase=Phase.TENSOR)
class ContextParallel(Method):
    """Split sequences over the axis `context`, with attention around a ring."""

    load_balance: bool = True
    """Give each process a piece from the front of the sequence and one from its back: a causal mask then leaves all of
    them the same work. Off, pieces are in order, and the last process has almost twice its share."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The axis context."""
        return ("context",)

    def unfit(self, cost: Cost) -> str | None:
        """Sequences are cut into one piece a process, two with load balance, and ulysses cuts these again."""
        pieces = cost.size("context", "sequence") * (2 if self.load_balance else 1)
        return uncuttable(cost.segments, pieces, self.name)

    def cost(self, cost: Cost) -> Cost:
        """The split. Out of order, the last of c processes has (2 c - 1) / c² of a causal triangle for its 1 / c."""
        cost = split_context(cost)
        if self.load_balance or cost.context == 1:
            return cost
        more = 2 - 1 / cost.context
        slowest = (replace(each, attention_flops=more * each.attention_flops) for each in cost.segments)
        return replace(cost, segments=tuple(slowest))

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """With load balance, where the model attends to sequences and several devices share them."""
        if cluster.world_size > 1 and any(block.attention_flops and block.sequence_length for block in profile.blocks):
            yield cls()
