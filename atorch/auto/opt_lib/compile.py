"""compile: torch.compile of the model's repeated blocks, in place.

Work: fewer kernels and less memory traffic, at the cost of compile time in the first step. Memory: fused kernels save
fewer activations. Communication: unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from atorch.auto.opt_lib.shared.model_requirements import changes_modules
from atorch.auto.strategy.method import Method, Phase, Simulation, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, Segment

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context


@method("compile", phase=Phase.COMPILE)
class Compile(Method):
    """Compile blocks of the model."""

    simulated: ClassVar[Simulation] = "left out"

    wrap_class: tuple[str, ...] | None = None
    """Classes or names of the modules to compile; None for the repeated blocks, or the whole model if it has none."""
    backend: str = "inductor"
    """torch.compile's backend."""
    mode: str | None = None
    """torch.compile's mode, such as "max-autotune"."""
    dynamic: bool | None = None
    """True if shapes vary; None lets torch find out."""
    fullgraph: bool = False
    """Refuse modules that do not compile into one graph."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        from atorch.model.structure import module_names

        if isinstance(config, Mapping) and config.get("wrap_class") is not None:
            config = {**config, "wrap_class": module_names(config["wrap_class"], "compile wrap_class")}
        return super().of(config)

    @property
    def joins_backward(self) -> str:
        return "computes both at once: leave it out"

    def cost(self, cost: Cost) -> Cost:
        """Fused operations inside the blocks: only traffic of matmuls, and a third of the launches.

        Factors of launches and activations are empirical, from PyTorch 2 on transformers; a dry run corrects them.
        """
        left, inside = _fused(cost.segments)
        return cost.replace(
            compiled=True,
            traffic_scale=cost.traffic_scale * left,
            ops_scale=cost.ops_scale * (1 - inside * 2 / 3),
            activation_scale=cost.activation_scale * (1 - inside / 5),
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """The defaults, for a model that can be traced: any other would fall into many graphs."""
        if profile.traced:
            yield cls()

    def check(self, ctx: Context) -> None:
        for part in () if changes_modules(ctx) else ctx.parts:
            self.chosen(part)

    def apply(self, ctx: Context) -> Context:
        # Else torch's compiler reuses the memory of saved tensors, and forbids backward(retain_graph=True), which plain
        # training allows. It reads this flag whenever it compiles and in every backward pass: it is the process's.
        from torch._functorch import config as functorch_config

        functorch_config.donated_buffer = False
        for part in ctx.parts:
            for module in self.chosen(part).values():
                module.compile(backend=self.backend, mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph)
        return ctx

    def chosen(self, part: nn.Module) -> Mapping[str, nn.Module]:
        from atorch.model.structure import find_modules, repeated_blocks

        if self.wrap_class is None:
            return repeated_blocks(part) or {"": part}
        return find_modules(part, self.wrap_class, "compile wrap_class")


@lru_cache(maxsize=4096)
def _fused(segments: tuple[Segment, ...]) -> tuple[float, float]:
    """The share of all traffic that remains if blocks are fused, and the blocks' share of the forward FLOPs.

    All operations between two matmuls form one kernel. It reads results of matmuls, writes as much for the next ones,
    and reads and writes the residual stream, twice a block. Attention scores that are written count as results: at most
    4 bytes each, one for 4 FLOPs per feature of a head. A model without blocks counts as one block.
    """
    blocks = [segment for segment in segments if segment.is_block] or segments
    saved = 0.0
    for block in blocks:
        results = block.inside.selective_bytes + block.outside.selective_bytes
        if block.writes_scores:
            results += 4.0 * block.attention_flops / 4.0 / (block.head_dim or 1.0)
        saved += block.count * max(0.0, block.traffic_bytes - 2.0 * results - 4.0 * block.input_bytes)
    whole, of_blocks = sum(segment.count * segment.traffic_bytes for segment in segments), sum(map(_flops, blocks))
    return 1.0 - saved / whole if whole else 1.0, of_blocks / sum(map(_flops, segments)) if of_blocks else 1.0


def _flops(segment: Segment) -> float:
    return segment.count * (segment.matmul_flops + segment.attention_flops)
