"""The four boundaries between a split region and tensors that are whole on every rank.

| forward | backward | where |
|---|---|---|
| `fork`: identity | sum over ranks | tensors that every rank uses whole, each for its part |
| `reduce`: sum over ranks | identity | results of a row split |
| `share`: one rank's share | identity | terms that a sum over ranks must add once |
| `gather`: all parts | its own part | logits of a split vocabulary |

Shoeybi et al. 2019 (arXiv 1909.08053) call the first two f and g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.gradients.no_double_backward import mapped


def fork(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` itself; its gradient is summed over the group."""
    return mapped(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the group's `x`."""
    return mapped(x, lambda x: _summed(x, group), lambda grad: grad)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def share(x: Tensor, size: int) -> Tensor:
    """`x / size`, which `size` ranks add up to `x`; the gradient is whole on every rank already."""
    return mapped(x, lambda x: x / size, lambda grad: grad)


def join(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The group's `x`, concatenated along the last dim; rank r has `counts[r]` columns. Without gradients."""
    padded = torch.nn.functional.pad(x, (0, max(counts) - x.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)


def gather(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`join`, with the rank's own part of the gradient in backward."""
    rank = dist.get_rank(group)
    start, count = sum(counts[:rank]), counts[rank]
    return mapped(x, lambda x: join(x, counts, group), lambda grad: grad.narrow(-1, start, count))
