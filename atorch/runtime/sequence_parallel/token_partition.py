"""Tokens split evenly over the ranks of a group, and gathered again.

A loss that every rank computes from whole results has whole gradients on every rank. In the split region, a rank's
gradients are those of its own tokens. Gradients of parameters that all ranks hold whole may be averaged over the group
in the end. Then the region's gradients are multiplied by the group's size on the way in, and divided on the way out.
The average is then right on both sides.

| | forward | backward |
|---|---|---|
| `scatter` | own tokens | all-gather, divided by the size |
| `gather` | all-gather | own tokens, times the size |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.runtime.gradients.no_double_backward import mapped


@dataclass(frozen=True, eq=False)
class TokenPartition:
    """The tokens of a sequence that each rank of a group has."""

    group: dist.ProcessGroup
    balanced: bool = False
    """A rank has a piece from the front and its mirror image from the back, for equal work under a causal mask; else
    one contiguous piece."""
    averaged: bool = True
    """True if the gradients of parameters are averaged over the group in the end."""
    told: set[str] = field(default_factory=set, repr=False)
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
