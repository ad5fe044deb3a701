"""Tokens split evenly over the ranks of a group, and gathered again, or kept split outside of blocks.

A loss that every rank computes from whole results has whole gradients on every rank. In the split region, a rank's
gradients are those of its own tokens. Gradients of parameters that all ranks hold whole may be averaged over the group
in the end. Then the region's gradients are multiplied by the group's size on the way in, and divided on the way out.
The average is then right on both sides.

| | forward | backward |
|---|---|---|
| `scatter` | own tokens | all-gather, divided by the size |
| `gather` | all-gather | own tokens, times the size |

Results of a model outside of its blocks may stay split, the logits the largest. Token-local work runs on a rank's own
tokens: modules that passed a trial (`token_split`), products, casts, views. Cross entropies and the like need
no gathered logits: each rank computes one number per token, and all ranks gather these. Everything else gathers first:
see `tensor_parallel.sharding_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.runtime.gradients.backward import mapped
from atorch.runtime.tensor_parallel.sharded_activation import DimSharding, SplitTensor, from_part, to_part
from atorch.runtime.tensor_parallel.sharding_rules import ShardedActivation


@dataclass(frozen=True, eq=False)
class TokenPartition:
    """The tokens of a sequence that each rank of a group has."""

    group: dist.ProcessGroup
    balanced: bool = False
    """A rank has a piece from the front and its mirror image from the back, for equal work under a causal mask; else
    one contiguous piece."""
    averaged: bool = True
    """True if the gradients of parameters are averaged over the group in the end."""
    already_warned: set[str] = field(default_factory=set, repr=False)
    """Names of functions whose gather of split tokens was logged."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def pieces(self) -> int:
        """The number of equal pieces that a sequence is cut into."""
        return self.size * (2 if self.balanced else 1)

    def part(self, x: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """The tokens of `rank`, by default this one, along `dim`: a view if they are one piece.

        Raises:
            ArgumentError: the tokens cannot be cut into equal pieces.
        """
        rank, length = self.rank if rank is None else rank, x.shape[dim]
        if length % self.pieces:
            raise ArgumentError(
                f"sequences are cut into {self.pieces} equal pieces, but were given with {length} tokens; pad them to "
                f"a multiple of {self.pieces}, or leave them whole"
            )
        step = length // self.pieces
        first = x.narrow(dim, rank * step, step)
        if not self.balanced:
            return first
        return torch.cat([first, x.narrow(dim, (self.pieces - 1 - rank) * step, step)], dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The sequence of which rank r has `parts[r]`."""
        if not self.balanced:
            return torch.cat(list(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], dim)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that every rank has whole."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self.part(x, dim)
        scale = self.size if self.averaged else 1
        return mapped(
            x,
            lambda x: self.part(x, dim).clone(memory_format=torch.contiguous_format),
            lambda grad: self.all_gather(grad / scale, dim),
        )

    def gather(self, x: Tensor, dim: int) -> Tensor:
        scale = self.size if self.averaged else 1
        return mapped(x, lambda x: self.all_gather(x, dim), lambda grad: self.part(grad, dim) * scale)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """`gather` without gradients."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return self.whole(parts, dim)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenPartition:
        return self  # a copy of the model lives on the same processes


@dataclass(frozen=True)
class Tokens(DimSharding):
    """A dim of `outer` × tokens × `inner` elements; the tokens are those from `start` to `stop` of `count`.

    Causal language models take their loss of all tokens but the last: `logits[:, :-1]`. A rank then keeps the logits of
    all of its tokens, and ignores those outside of the window. Labels are cut to match, logits are not.
    """

    share: TokenPartition
    count: int
    start: int
    stop: int
    outer: int = 1
    inner: int = 1
    scale: float = 1.0
    """Factor of the parts: their gradients are averaged over the ranks (see `TokenPartition`)."""
    averages_gradients = True

    @classmethod
    def all_of(cls, share: TokenPartition, count: int) -> Tokens:
        return cls(share, count, 0, count)

    @property
    def group(self) -> dist.ProcessGroup:  # type: ignore[override]
        return self.share.group

    @property
    def part_size(self) -> int:  # type: ignore[override]
        return self.count // self.share.size

    @property
    def total(self) -> int:  # type: ignore[override]
        return self.outer * (self.stop - self.start) * self.inner

    def resized(self, outer: int, inner: int) -> Tokens:
        return replace(self, outer=outer, inner=inner)

    def window(self, start: int, stop: int) -> Tokens | None:
        if (self.outer, self.inner) != (1, 1):
            return None
        return replace(self, start=self.start + start, stop=self.start + stop)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim`, with zeros outside of the window."""
        tokens = whole.unflatten(dim, (self.outer, self.stop - self.start, self.inner)).movedim(dim + 1, -1)
        if (self.start, self.stop) != (0, self.count):
            tokens = F.pad(tokens, (self.start, self.count - self.stop))
        part = self.share.part(tokens, -1).movedim(-1, dim + 1).flatten(dim, dim + 2)
        return part if self.scale == 1.0 else part / self.scale

    def join(self, part: Tensor, dim: int) -> Tensor:
        if isinstance(part, SplitTensor):  # along another dim
            part = part._values()
        tokens = part.unflatten(dim, (self.outer, self.part_size, self.inner))
        whole = self.share.all_gather(tokens, dim + 1).narrow(dim + 1, self.start, self.stop - self.start)
        whole = whole.flatten(dim, dim + 2)
        return whole if self.scale == 1.0 else whole * self.scale

    def gradient_of(self, grad: Tensor, dim: int) -> Tensor:
        return self.take(grad, dim) / self.of_gradients().scale

    def of_gradients(self) -> Tokens:
        """The layout of gradients: if ranks are averaged, parts' gradients are too large by their number."""
        return replace(self, scale=1.0 / self.share.size) if self.share.averaged else self

    def named(self) -> str:
        return f"{self.part_size} of {self.count} tokens"

    def note_gather(self, name: str, shape: tuple[int, ...]) -> None:
        """Log a gather once for each function: the whole may be hundreds of times larger than a rank's part."""
        if name not in self.share.already_warned:
            self.share.already_warned.add(name)
            logger.info(
                "%s asks for all tokens of %s: every process gathers them. Cross entropies and what works token by "
                "token do not",
                name,
                shape,
            )


def split_tokens(part: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """The tensor of which `part` holds this rank's tokens along `dim`."""
    dim %= part.dim()
    tokens: Tensor = from_part(ShardedActivation, part, Tokens.all_of(share, part.shape[dim] * share.size), dim)
    return tokens


def is_by_tokens(x: Tensor, dim: int) -> bool:
    """True if ranks have tokens of `x` along `dim`, and it was not gathered."""
    is_split = isinstance(x, SplitTensor) and not x._is_whole and isinstance(x._layout, Tokens)
    return is_split and x._axis == dim % x.dim()  # type: ignore[attr-defined]


def own_tokens(x: Tensor, dim: int, share: TokenPartition) -> Tensor:
    """This rank's tokens of a tensor that is whole on every rank, or split by tokens already."""
    if isinstance(x, SplitTensor) and is_by_tokens(x, dim) and x._layout == Tokens.all_of(share, x._layout.count):
        return to_part(x)
    return share.scatter(x, dim)
