"""The columns of logits that each rank of a group has: contiguous runs, in rank order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.tensor_parallel.collectives import join


@dataclass(frozen=True)
class VocabularyShards:
    """Rank r has `counts[r]` columns, after those of lower ranks; this process is `rank`."""

    counts: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyShards:
        return self  # process groups cannot be copied

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def count(self) -> int:
        return self.counts[self.rank]

    @property
    def start(self) -> int:
        return sum(self.counts[: self.rank])

    def length(self, part: int) -> int:
        return self.total

    def gradient_of(self, grad: Tensor, dim: int) -> Tensor:
        return self.take(grad, dim)

    def of_gradients(self) -> VocabularyShards:
        """The layout of gradients, which is the same."""
        return self

    def named(self) -> str:
        return f"columns {self.start} to {self.start + self.count} of {self.total}"

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor, as a view."""
        return whole.narrow(dim, self.start, self.count)

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The ranks' parts, concatenated along `dim`. Without gradients."""
        return join(part.movedim(dim, -1), self.counts, self.group).movedim(-1, dim)

    def meet(self, values: Tensor) -> Tensor:
        """The values of every rank, stacked along a new first dim. Without gradients."""
        gathered = [torch.empty_like(values) for _ in self.counts]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return torch.stack(gathered)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of tokens among this rank's columns, 0 for those of other ranks; and a mask of the latter.

        Raises:
            RuntimeError: a token is no column of any rank (on CUDA, the device's assertion).
        """
        in_bounds = ((tokens >= 0) & (tokens < self.total)).all()
        torch._assert_async(in_bounds, f"a target is out of bounds: logits have {self.total} classes")
        index = tokens - self.start
        elsewhere = (index < 0) | (index >= self.count)
        return index.masked_fill(elsewhere, 0), elsewhere
