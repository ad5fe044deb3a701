"""expert_parallel: each process holds a part of a mixture's experts, and tokens are sent to them. Only for plans.

Memory: (parameters + gradients + optimizer states) of experts / size; everything else stays as it is. The processes are
neighbours that otherwise hold the same parameters (tensor × sequence × context × zero × data), as in Megatron-LM's
parallel folding (arXiv 2504.14960) and in torchtitan. The data-parallel method shards or reduces experts over processes
that hold the same ones. Communication per block and pass: tokens are sent to their experts and back (Lepikhin et al.
2020, arXiv 2006.16668). Megatron-LM, torchtitan and NeMo AutoModel have programs for it; atorch does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import Self

from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from atorch.auto.context import Context

MOST_HELD = 32  # experts of a block that a process may hold, in what a search tries


@method("expert_parallel", phase=Phase.SPLIT)
class ExpertParallel(Method):
    """Divide the experts of mixtures over processes that have other tokens."""

    planned_only: ClassVar[bool] = True

    size: Annotated[int, Field(ge=1)] = 1
    """Number of processes that share the experts of a block."""
    dispatcher: Literal["all_to_all", "deepep"] = "all_to_all"
    """all_to_all sends a token once for each of its experts; deepep, once to each process that has some of them, or to
    each node if size spans several."""
    skew: Annotated[float, Field(ge=0)] = 0.0
    """Tokens of the busiest expert over the mean; 0: tokens are spread evenly. All processes wait for the busiest."""

    def unfit(self, cost: Cost) -> str | None:
        """Require a mixture whose experts divide evenly, and processes that otherwise hold the same parameters."""
        counts = {segment.num_experts for segment in cost.segments if segment.num_experts}
        tensor, ranks = cost.size("tensor"), cost.size("tensor", *REPLICA_AXES)
        if not counts:
            return "expert_parallel divides experts, and the model has none"
        if self.size == 1 or any(count % self.size for count in counts):
            return f"expert_parallel over {self.size} does not divide {max(counts)} experts"
        if ranks % self.size or self.size % tensor:
            return f"expert_parallel over {self.size} does not divide {ranks} replicas into groups of all tensor ranks"
        if tensor > 1 and not cost.splits_norms:
            return "expert_parallel beside tensor_parallel needs tokens split over tensor: sequence_parallel(megatron)"
        return None

    def cost(self, cost: Cost) -> Cost:
        return cost.replace(expert=self.size, expert_skew=self.skew, sends_once=self.dispatcher == "deepep")

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        counts = {segment.num_experts for segment in profile.segments if segment.num_experts}
        for size in range(max(2, max(counts, default=0) // MOST_HELD), min(counts, default=0) + 1):
            if cluster.world_size % size == 0 and not any(count % size for count in counts):
                yield cls(size=size)

    def check(self, ctx: Context) -> None:
        """Refuse: there is no program for it.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            f"{self} is only for plans: atorch has no program that divides experts yet. Leave it out, which leaves "
            f"{ctx.strategy.without(self.name)}; or train with Megatron-LM or torchtitan"
        )
