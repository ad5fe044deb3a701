"""The four ways in which a split region meets what is whole on every rank.

| forward | backward | where |
|---|---|---|
| `fork`: as it is | sum over ranks | what every rank uses whole, each for its part |
| `reduce`: sum over ranks | as it is | the results of a row split |
| `share`: one rank's share | as it is | what is added before a sum over ranks, and must be added once |
| `gather`: all parts | its own part | logits of a vocabulary that is split |

Shoeybi et al. 2019 (arXiv 1909.08053) call the first two f and g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.gradients.no_double_backward import mapped


def fork(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, whose gradient will be summed over the group."""
    return mapped(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the group's `x`."""
    return mapped(x, lambda x: _summed(x, group), lambda grad: grad)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def share(x: Tensor, size: int) -> Tensor:
    """`x / size`, which `size` ranks add up to `x`; every rank has the whole gradient already."""
    return mapped(x, lambda x: x / size, lambda grad: grad)


def join(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The group's `x` side by side along the last dim, of which rank r gives `counts[r]`. Without gradients."""
    padded = torch.nn.functional.pad(x, (0, max(counts) - x.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)


def gather(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`join`, and in backward the rank's own part of the gradient."""
    rank = dist.get_rank(group)
    start, count = sum(counts[:rank]), counts[rank]
    return mapped(x, lambda x: join(x, counts, group), lambda grad: grad.narrow(-1, start, count))
