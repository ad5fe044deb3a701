"""offload: shares of parameters, optimizer states and activations stay in host memory.

Memory: the device holds less by that share of each. Transfers over the host link, per step: for parameters, every
gather, and gradients back. For optimizer states, which the host steps: gradients down and parameters up (Ren et al.
2021, arXiv 2101.06840); for activations, down in forward and up in backward. The alternative is chunk, which keeps to a
budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.shared.optimizer_compatibility import need_no_closure, state_bytes
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import ArgumentError, StrategyError

if TYPE_CHECKING:
    from atorch.auto.context import Context
    from atorch.runtime.memory.offload import HostOptimizer

OffloadFraction = Annotated[float, Field(ge=0, le=1)]


@method("offload", phase=Phase.SHARD)
class Offload(Method):
    """Keep shares of a step's state in host memory."""

    saves_memory: ClassVar[bool] = True
    acts_in_calls: ClassVar[bool] = True
    keeps_on_host: ClassVar[bool] = True

    parameters: OffloadFraction = 0.0
    """Share of parameters and gradients, under fsdp: whole groups that it gathers, blocks first, as long as they fit
    the share."""
    optimizer: OffloadFraction = 1.0
    """Share of optimizer states and fp32 masters, by whole parameters; the host steps these. Offloaded parameters come
    first, then others in the optimizer's order, as long as they fit the share."""
    activations: OffloadFraction = 0.0
    """Share of the repeated blocks whose saved activations are offloaded: the first ones, never the last of several."""

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

    def __str__(self) -> str:
        """The offloaded parts: `activations offloaded`, `parameters, 50% of optimizer offloaded`."""
        shares = {"parameters": self.parameters, "optimizer": self.optimizer, "activations": self.activations}
        waiting = (name if share == 1 else f"{100 * share:.3g}% of {name}" for name, share in shares.items() if share)
        return f"{', '.join(waiting)} offloaded"

    @property
    def needs(self) -> tuple[str, ...]:
        """fsdp, if parameters are offloaded: it gathers them for use."""
        return ("fsdp",) if self.parameters else ()

    def unfit(self, cost: Cost) -> str | None:
        """Refuse parameters and optimizer states under chunk, which places them itself; activations are allowed."""
        if cost.budget_bytes < math.inf and (self.parameters or self.optimizer):
            return "chunk decides which states wait in host memory; offload only activations with it"
        if self.activations and not _num_moved(self.activations, cost.num_blocks / cost.stages):
            return f"activations {self.activations:g} is less than one block of {cost.num_blocks / cost.stages:g}"
        return None

    @property
    def spans_blocks(self) -> bool:
        # It chooses which tensors make up a share of all.
        return not {self.parameters, self.optimizer, self.activations} <= {0.0, 1.0}

    def cost(self, cost: Cost) -> Cost:
        """Set the shares, from which transfers follow. Backward holds activations of two blocks: this and the next."""
        blocks = cost.num_blocks / cost.stages
        moved = _num_moved(self.activations, blocks) if blocks > 1 else 0.0
        return cost.replace(
            param_offload=self.parameters,
            optim_offload=self.optimizer,
            activation_offload=moved / blocks if moved else 0.0,
            activations_ahead=min(2.0, moved) / blocks if moved else 0.0,
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """Optimizer states; parameters as well; only activations; all. None on a CPU, whose memory is the host's."""
        if cluster.device.type == "cpu":
            return
        yield cls()
        yield cls(parameters=1.0)
        yield cls(optimizer=0.0, activations=1.0)
        yield cls(parameters=1.0, activations=1.0)

    def check(self, ctx: Context) -> None:
        from atorch.model.structure import repeated_blocks
        from atorch.runtime.memory.offload_activations import num_offloaded

        strategy = ctx.strategy
        if self.optimizer and ctx.make_optimizer is None:
            raise StrategyError("offload was given optimizer, but there is none; give optim_func, or set it to 0")
        if self.activations and not strategy.splits_over("pipeline"):  # its stages have fewer blocks
            try:
                num_offloaded(self.activations, sum(len(repeated_blocks(part)) for part in ctx.parts))
            except ArgumentError as error:
                raise StrategyError(f"offload: {error}") from None
        if not {*self.needs} <= {*strategy.names()}:
            raise StrategyError(
                f"offload was given parameters {self.parameters:g}, but only parameters that fsdp gathers as they are "
                "used can wait in host memory; add fsdp, or take chunk, which fetches them on a single process too"
            )
        for other in strategy if self.optimizer else ():
            if other.places_states:
                raise StrategyError(
                    f"offload was given optimizer with {other.name}, which decides itself which states wait in host "
                    'memory; give it only activations, ("offload", {"optimizer": 0.0, "activations": 1.0})'
                )
            if other.engine:
                raise StrategyError(
                    f"offload was given optimizer with {other.name} with the {other.engine} backend, which steps "
                    f"itself; leave the backend of {other.name} out"
                )

    def check_optimizer(self, ctx: Context) -> None:
        """Refuse a closure if the host steps: its gradients come from the device."""
        if self.optimizer:
            need_no_closure(ctx, self.name, "leave out offload's optimizer")

    def apply(self, ctx: Context) -> Context:
        """Save activations of blocks on the host, and step the optimizer there; fsdp has placed the parameters."""
        from atorch.distributed.host_memory import is_simulated, need_host_memory
        from atorch.runtime.memory.offload import HostOptimizer, host_bytes
        from atorch.runtime.optimizer.user_optimizer import materialized

        self.check(ctx)
        inner, on_host, values = ctx.make_optimizer, ctx.on_host, ctx.fp32_values
        if not any(other.places_states for other in ctx.strategy):  # else it has moved activations already
            ctx = self.move_activations(ctx)
        if inner is None or self.optimizer == self.parameters:
            return replace(ctx)

        def make(groups: Any) -> HostOptimizer:
            full_groups = materialized(groups)
            if not is_simulated(ctx.parts):
                needed = host_bytes(full_groups, self.optimizer, on_host, state_bytes(ctx))
                need_host_memory(
                    needed,
                    "what offload keeps there (copies of parameters, masters, optimizer states, gradients of a step)",
                    "Offload a smaller share (optimizer=0.5), use more processes with zero1 or fsdp, or take chunk, "
                    "which has disk",
                )
            return HostOptimizer(inner, full_groups, self.optimizer, away=on_host, values=values)

        return replace(ctx, make_optimizer=make)

    def move_activations(self, ctx: Context) -> Context:
        """Save the activations of the configured share of blocks on the host.

        Raises:
            StrategyError: the share is less than one block.
        """
        from atorch.model.structure import repeated_blocks
        from atorch.runtime.memory.offload_activations import SMALL_BYTES, offload_activations

        if not self.activations:
            return ctx
        blocks = [block for part in ctx.parts for block in repeated_blocks(part).values()]
        # Decided here, and not by each tensor: a pass on fake CPU tensors must offload the same ones.
        small_bytes = 1 if ctx.device.type == "cpu" else SMALL_BYTES
        try:
            origin = offload_activations(blocks, self.activations, small_bytes)
        except ArgumentError as error:
            raise StrategyError(f"offload: {error}") from None
        return replace(ctx, on_host=(*ctx.on_host, origin))


def _num_moved(share: float, blocks: float) -> float:
    """Number of blocks whose activations are offloaded: whole ones, and the last only if it is the only one."""
    return min(math.floor(share * blocks * (1 + 1e-9)), max(1.0, blocks - 1.0))
