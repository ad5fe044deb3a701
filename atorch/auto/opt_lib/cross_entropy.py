"""cross_entropy: losses of a language model's logits by chunks of tokens, so that all logits never exist together.

Memory: of logits, what a loss keeps of them and their gradients a chunk's alone; the gradient of the head's weight
exists from the loss on. Work: as without where a loss is one number of all tokens, with a product more where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field, field_validator
from torch import nn
from typing_extensions import Self

from atorch.auto.context import Context
from atorch.auto.opt_lib.compile import Compile
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.shared.model_requirements import changes_modules, has_compiled_loss
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, Matmul, ModelProfile, Region, Segment
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.model.structure import repeated_blocks
from atorch.runtime.loss.lazy_logits import LEAST, SHARES, chunk_logits

MANY = 4096
"""Classes of a head that the search tries it for,"""
WORTH = 0.02
"""where its logits take so much of a device."""


@method("cross_entropy", phase=Phase.RECOMPUTE)
class CrossEntropy(Method):
    """Compute logits by chunks of tokens, when a loss is taken of them."""

    head: tuple[str, ...] | None = None
    """Names of the linear layers that give logits; None for the one with the most outputs outside of blocks."""
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens whose logits exist at once; None for a sixteenth of a pass's, 128 at least."""

    @field_validator("head", mode="before")
    @classmethod
    def _one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    def unfit(self, cost: Cost) -> str | None:
        """All tokens and classes of a head are in one place."""
        split = {"tensor_parallel": cost.tensor, "sequence_parallel": cost.sequence, "context_parallel": cost.context}
        return next((_beside(name) for name, size in split.items() if size > 1), None)

    def cost(self, cost: Cost) -> Cost:
        """Logits and their loss by chunks: a chunk's at once, none kept, and the head's gradient made early."""
        tokens = cost.batch_size / cost.traced_batch
        return cost.but(segments=tuple(self._of_chunks(each, tokens) for each in cost.segments))

    def _of_chunks(self, segment: Segment, share: float) -> Segment:
        product = _product(segment)
        if product is None:
            return segment
        rows = product.rows * share
        chunks = rows / self.chunk_tokens if self.chunk_tokens else min(float(SHARES), rows / LEAST)
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
        """As it is, where there are many classes and logits take a good part of a device."""
        for segment in profile.segments:
            product = _product(segment)
            if product is not None and product.columns >= MANY:
                taken = segment.inside.saved_bytes + segment.working_bytes
                if taken >= WORTH * cluster.device.memory_bytes:
                    yield cls()
                    return

    def check(self, ctx: Context) -> None:
        """There is a head, whose logits nothing splits, moves or compiles."""
        for other in ctx.strategy or ():
            if other.name in _REFUSED:
                raise StrategyError(_beside(other.name))
            if isinstance(other, Fsdp) and other.reshard_after_forward not in (None, False):
                raise StrategyError(
                    f"cross_entropy computes logits after forward, and {other.name} was given reshard_after_forward="
                    f"{other.reshard_after_forward}, which frees the head's weight; leave it out"
                )
        if has_compiled_loss(ctx):
            raise StrategyError("cross_entropy is beyond a compiled loss_func; give the function that was compiled")
        if ctx.strategy is None or "fp8" not in ctx.strategy.names():
            self._heads(ctx)

    def apply(self, ctx: Context) -> Context:
        """Let the heads give lazy logits, in place."""
        lasting = ctx.strategy is None or ctx.strategy.get(Fsdp) is None
        for name, head in self._heads(ctx).items():
            chunk_logits(head, self.chunk_tokens, without_gradients=lasting)
            logger.info("cross_entropy: losses of %s (%d classes) are taken by chunks", name, head.out_features)
        return ctx

    def _heads(self, ctx: Context) -> dict[str, nn.Linear]:
        found: dict[str, nn.Linear] = {}
        for part in ctx.parts:
            inside = {each for module in _compiled(ctx, part) for each in module.modules()}
            for name, head in self._of_part(part).items():
                reason = "its forward was replaced on the instance" if "forward" in vars(head) else None
                reason = "compile has it in a graph" if head in inside else reason
                if reason is not None:
                    raise StrategyError(f"cross_entropy cannot take {name} by chunks: {reason}; leave one of them out")
                found[name] = head
        if not found and len(ctx.parts) == 1 and (ctx.mesh is None or ctx.mesh.size("pipeline") == 1):
            raise StrategyError(
                "cross_entropy finds no linear layer outside of the model's blocks with more outputs than inputs; name "
                'the one that gives logits, e.g. ("cross_entropy", {"head": "lm_head"})'
            )
        return found

    def _of_part(self, part: nn.Module) -> dict[str, nn.Linear]:
        linears = {name: each for name, each in part.named_modules() if type(each) is nn.Linear and name}
        if self.head is not None:
            return {name: each for name, each in linears.items() if name in self.head}
        inside = {each for block in repeated_blocks(part).values() for each in block.modules()}
        wide = {k: v for k, v in linears.items() if v not in inside and v.out_features > v.in_features}
        name = max(wide, key=lambda each: wide[each].out_features, default=None)
        return {} if name is None else {name: wide[name]}


def _compiled(ctx: Context, part: nn.Module) -> Iterable[nn.Module]:
    """The modules that `compile` takes, as far as their names are known."""
    other = ctx.strategy.get(Compile) if ctx.strategy is not None else None
    is_known = other is not None and not (other.wrap_class and changes_modules(ctx))
    return other.chosen(part).values() if other is not None and is_known else ()


_REFUSED: Mapping[str, str] = {
    "tensor_parallel": "takes losses of each process's classes",
    "sequence_parallel": "takes losses of each process's tokens",
    "context_parallel": "takes losses of each process's tokens",
}


def _beside(name: str) -> str:
    return f"cross_entropy and {name} exclude each other: {name} {_REFUSED[name]}; leave one of them out"


def _product(segment: Segment) -> Matmul | None:
    """The product of a segment that gives logits, of which it takes a cross entropy."""
    if segment.is_block or not segment.num_losses:
        return None
    split = (each for each in segment.matmuls if each.split == "columns" and each.columns > each.inner)
    return max(split, key=lambda each: each.columns, default=None)
