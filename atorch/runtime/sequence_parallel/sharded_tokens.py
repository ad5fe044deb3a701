"""Activations of which each rank has some tokens: results of a model outside of its blocks, the logits the largest.

Token-local work runs on a rank's own tokens: modules that passed a trial (`token_local_modules`), products, casts,
views. Cross entropies and the like need no gathered logits: each rank computes one number per token, and all ranks
gather these. Everything else gathers first: see `tensor_parallel.sharding_rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from atorch.logs import logger
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.sharded_activation import DimSharding, SplitTensor, from_part, to_part
from atorch.runtime.tensor_parallel.sharding_rules import ShardedActivation


@dataclass(frozen=True)
class Tokens(DimSharding):
    """A dim of `outer` × tokens × `inner` elements; the tokens are those from `start` to `stop` of `count`.

    Causal language models take their loss of all tokens but the last: `logits[:, :-1]`. A rank then keeps the logits
    of all of its tokens, and ignores those outside of the window: labels are cut to match, logits are not.
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

    def length(self, part: int) -> int:
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
        if name not in self.share.told:
            self.share.told.add(name)
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


def own_tokens(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """This rank's tokens of a tensor that is whole on every rank, or split by tokens already."""
    if isinstance(x, SplitTensor) and is_by_tokens(x, dim) and x._layout == Tokens.all_of(share, x._layout.count):
        return to_part(x)
    return share.scatter(x, dim)
