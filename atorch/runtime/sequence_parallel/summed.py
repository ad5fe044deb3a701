"""Tokens and splits over the same ranks: gathered before a column split, summed and scattered after a row split.

| | forward | backward |
|---|---|---|
| `gather_tokens` | all-gather | reduce-scatter |
| `scatter_sum` | reduce-scatter | all-gather |

Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.1) call them g and its conjugate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.first_order import first_order
from atorch.runtime.sequence_parallel.share import Share


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, dim: int) -> Tensor:
        ctx.share, ctx.dim = share, dim
        return share.all_gather(x, dim)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.share, ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, dim: int) -> Tensor:
        ctx.share, ctx.dim = share, dim
        return _reduce_scatter(x, share, dim)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.share.all_gather(grad, ctx.dim), None, None


def gather_tokens(x: Tensor, share: Share, dim: int) -> Tensor:
    """All ranks' tokens, whose gradients are summed over the ranks."""
    whole: Tensor = _GatherTokens.apply(x, share, dim)  # type: ignore[no-untyped-call]
    return whole


def scatter_sum(x: Tensor, share: Share, dim: int) -> Tensor:
    """This rank's tokens of the sum of the ranks' `x`."""
    own: Tensor = _ScatterSum.apply(x, share, dim)  # type: ignore[no-untyped-call]
    return own


def _reduce_scatter(x: Tensor, share: Share, dim: int) -> Tensor:
    parts = [share.part(x, dim, rank).contiguous() for rank in range(share.size)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=share.group)
    return own
