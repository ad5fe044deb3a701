"""The tokens of a dim that each rank has; the dim may be a window of the sequence, or samples and tokens in one.

Causal language models take their loss of all tokens but the last: `logits[:, :-1]`. A rank then keeps the logits of all
of its tokens, and ignores those outside of the window: labels are cut to match, logits are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.sharded_activation import SplitTensor


@dataclass(frozen=True)
class Tokens:
    """A dim of `outer` × tokens × `inner` elements; the tokens are those from `start` to `stop` of `count`."""

    share: TokenPartition
    count: int
    start: int
    stop: int
    outer: int = 1
    inner: int = 1
    scale: float = 1.0
    """Factor of the parts: their gradients are averaged over the ranks (see `TokenPartition`)."""

    @classmethod
    def all_of(cls, share: TokenPartition, count: int) -> Tokens:
        return cls(share, count, 0, count)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.share.group

    @property
    def each(self) -> int:
        return self.count // self.share.size

    def length(self, part: int) -> int:
        """Elements of the whole dim; every rank has an equal number of its tokens."""
        return self.outer * (self.stop - self.start) * self.inner

    def window(self, start: int, stop: int) -> Tokens:
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
        tokens = part.unflatten(dim, (self.outer, self.each, self.inner))
        whole = self.share.all_gather(tokens, dim + 1).narrow(dim + 1, self.start, self.stop - self.start)
        whole = whole.flatten(dim, dim + 2)
        return whole if self.scale == 1.0 else whole * self.scale

    def gradient_of(self, grad: Tensor, dim: int) -> Tensor:
        part = self.take(grad, dim)
        return part / self.of_gradients().scale

    def of_gradients(self) -> Tokens:
        """The layout of gradients: if ranks are averaged, parts' gradients are too large by their number."""
        return replace(self, scale=1.0 / self.share.size) if self.share.averaged else self

    def named(self) -> str:
        return f"{self.each} of {self.count} tokens"
