"""Tokens and splits over the same ranks: gathered before a column split, summed and scattered after a row split.

| | forward | backward |
|---|---|---|
| `gather_tokens` | all-gather | reduce-scatter |
| `scatter_sum` | reduce-scatter | all-gather |

Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2.1) call them g and its conjugate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.first_order import mapped
from atorch.runtime.sequence_parallel.share import Share


def gather_tokens(x: Tensor, share: Share, dim: int) -> Tensor:
    """All ranks' tokens, whose gradients are summed over the ranks."""
    return mapped(x, lambda x: share.all_gather(x, dim), lambda grad: _reduce_scatter(grad, share, dim))


def scatter_sum(x: Tensor, share: Share, dim: int) -> Tensor:
    """This rank's tokens of the sum of the ranks' `x`."""
    return mapped(x, lambda x: _reduce_scatter(x, share, dim), lambda grad: share.all_gather(grad, dim))


def _reduce_scatter(x: Tensor, share: Share, dim: int) -> Tensor:
    parts = [share.part(x, dim, rank).contiguous() for rank in range(share.size)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=share.group)
    return own
