"""tensor_parallel: each process has a part of every matrix product, and the results are summed.

Memory: what lies between a product split by columns and one split by rows / tensor: parameters, gradients, optimizer
states, activations; norms and residual streams stay whole. Communication per block: two all-reduces of its activations
in forward and two in backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3), so the axis belongs inside a node.
Planned for, and not applied yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from typing_extensions import Self

from atorch.auto.opt_lib.divisible import indivisible
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.splits import split_tensor


@method("tensor_parallel", phase=Phase.TENSOR)
class TensorParallel(Method):
    """Split matrix products over the axis `tensor`."""

    plan: dict[str, Literal["column", "row"]] | None = None
    """How layers are split, by patterns of their names: {"layers.*.attn.q_proj": "column", …}; None: as the model
    itself tells."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The axis tensor."""
        return ("tensor",)

    def unfit(self, cost: Cost) -> str | None:
        """Heads, groups of keys and values, and experts are shared out whole."""
        if all(each.split == "none" for segment in cost.segments for each in segment.matmuls):
            return "no matrix product of the model can be split over tensor"
        return indivisible(cost.segments, cost.size("tensor"), "tensor", experts=True)

    def cost(self, cost: Cost) -> Cost:
        """The split; what it sends follows from the products."""
        return split_tensor(cost, splits_norms=cost.splits_norms)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """As the model itself tells, where several devices can share it."""
        if cluster.world_size > 1 and any(block.num_heads > 1 for block in profile.blocks):
            yield cls()
