"""cross_entropy: the loss of a language model by chunks of tokens, so that all logits never exist together.

Memory: logits, the parts that the loss saves, and their gradients exist for one chunk. The gradient of the head's
weight exists from the loss on. Work: unchanged if the loss is one number for all tokens; otherwise one more matmul.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, field_validator
from typing_extensions import Self

from atorch.auto.opt_lib.compile import Compile
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.shared.model_requirements import changes_modules, has_compiled_loss
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, Matmul, ModelProfile, Region, Segment
from atorch.cost.profile import LEAST_ROWS, LOGIT_CHUNKS
from atorch.errors import StrategyError
from atorch.logs import logger

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context

MANY = 4096
"""The fewest classes of a head for which the search tries the method."""
WORTH = 0.02
"""The smallest share of device memory, taken by logits, for which the search tries it."""


@method("cross_entropy", phase=Phase.RECOMPUTE)
class CrossEntropy(Method):
    """Compute logits by chunks of tokens, when a loss is taken of them."""

    saves_memory: ClassVar[bool] = True
    exclusions: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "tensor_parallel takes losses of each process's classes; leave one of them out",
        "sequence_parallel": "sequence_parallel takes losses of each process's tokens; leave one of them out",
        "context_parallel": "context_parallel takes losses of each process's tokens; leave one of them out",
    }

    head: tuple[str, ...] | None = None
    """Names of the linear layers that give logits; None for the one with the most outputs outside of blocks."""
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens whose logits exist at once; None for a sixteenth of a pass's tokens, at least 128."""

    @field_validator("head", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    def unfit(self, cost: Cost) -> str | None:
        """Require all tokens and classes of a head on one process."""
        split = {"tensor_parallel": cost.tensor, "sequence_parallel": cost.sequence, "context_parallel": cost.context}
        return next((self.exclusions[name] for name, size in split.items() if size > 1), None)

    def cost(self, cost: Cost) -> Cost:
        """Logits of one chunk at a time, none of them saved, and the head's gradient from the loss on."""
        tokens = cost.batch_size / cost.traced_batch
        return cost.replace(segments=tuple(self._of_chunks(segment, tokens) for segment in cost.segments))

    def _of_chunks(self, segment: Segment, share: float) -> Segment:
        product = _product(segment)
        if product is None:
            return segment
        rows = product.rows * share
        chunks = rows / self.chunk_tokens if self.chunk_tokens else min(float(LOGIT_CHUNKS), rows / LEAST_ROWS)
        if chunks <= 1.0:
            return segment
        inside = segment.inside
        return replace(
            segment,
            inside=Region(traffic_bytes=inside.traffic_bytes),
            working_bytes=(segment.working_bytes + inside.saved_bytes) / chunks,
            loss_chunks=chunks,
            early_gradient_bytes=4.0 * product.inner * product.columns if product.trainable else 0.0,
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """The defaults, if there are many classes and logits take a good part of device memory."""
        for segment in profile.segments:
            product = _product(segment)
            if product is not None and product.columns >= MANY:
                logits_bytes = segment.inside.saved_bytes + segment.working_bytes
                if logits_bytes >= WORTH * cluster.device.memory_bytes:
                    yield cls()
                    return

    def check(self, ctx: Context) -> None:
        """Check that there is a head, and that no other method splits, moves or compiles its logits."""
        for other in ctx.strategy:
            if isinstance(other, Fsdp) and other.reshard_after_forward not in (None, False):
                raise StrategyError(
                    f"cross_entropy computes logits after forward, and {other.name} was given reshard_after_forward="
                    f"{other.reshard_after_forward}, which frees the head's weight; leave it out"
                )
        if has_compiled_loss(ctx):
            raise StrategyError(
                "cross_entropy cannot see inside a compiled loss_func; give the function that was compiled"
            )
        if not ctx.strategy.uses("fp8"):
            self._heads(ctx)

    def apply(self, ctx: Context) -> Context:
        from atorch.runtime.loss.lazy_logits import chunk_logits

        lasting = ctx.strategy.get(Fsdp) is None
        for name, head in self._heads(ctx).items():
            chunk_logits(head, self.chunk_tokens, without_gradients=lasting)
            logger.info("cross_entropy: losses of %s (%d classes) are taken by chunks", name, head.out_features)
        return ctx

    def _heads(self, ctx: Context) -> dict[str, nn.Linear]:
        heads: dict[str, nn.Linear] = {}
        for part in ctx.parts:
            inside = {submodule for module in _compiled(ctx, part) for submodule in module.modules()}
            for name, head in self._of_part(part).items():
                reason = "its forward was replaced on the instance" if "forward" in vars(head) else None
                reason = "compile has it in a graph" if head in inside else reason
                if reason is not None:
                    raise StrategyError(f"cross_entropy cannot take {name} by chunks: {reason}; leave one of them out")
                heads[name] = head
        if not heads and len(ctx.parts) == 1 and (ctx.mesh is None or ctx.mesh.size("pipeline") == 1):
            raise StrategyError(
                "cross_entropy finds no linear layer outside of the model's blocks with more outputs than inputs; name "
                'the one that gives logits, e.g. ("cross_entropy", {"head": "lm_head"})'
            )
        return heads

    def _of_part(self, part: nn.Module) -> dict[str, nn.Linear]:
        from torch import nn

        from atorch.model.structure import repeated_blocks

        linears = {name: linear for name, linear in part.named_modules() if type(linear) is nn.Linear and name}
        if self.head is not None:
            return {name: linear for name, linear in linears.items() if name in self.head}
        inside = {module for block in repeated_blocks(part).values() for module in block.modules()}
        wide = {k: v for k, v in linears.items() if v not in inside and v.out_features > v.in_features}
        name = max(wide, key=lambda path: wide[path].out_features, default=None)
        return {} if name is None else {name: wide[name]}


def _compiled(ctx: Context, part: nn.Module) -> Iterable[nn.Module]:
    """The modules that `compile` will compile, if they exist already."""
    other = ctx.strategy.get(Compile)
    is_known = other is not None and not (other.wrap_class and changes_modules(ctx))
    return other.chosen(part).values() if other is not None and is_known else ()


def _product(segment: Segment) -> Matmul | None:
    """The product of a segment that computes logits for its cross entropy, or None."""
    if segment.is_block or not segment.num_losses:
        return None
    split = (matmul for matmul in segment.matmuls if matmul.split == "columns" and matmul.columns > matmul.inner)
    return max(split, key=lambda matmul: matmul.columns, default=None)
