"""The parameters of a split model as they stand in the whole one.

What a rank holds are rows in the ranks' order. Where a fused projection was cut, that is not the model's order, and
depends on the number of ranks: what is saved for others, or for another number of ranks, is saved from here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.layout import Rows
from atorch.runtime.tensor_parallel.model_layout import ModelLayout


@torch.no_grad()
def whole_state(
    model: nn.Module, layout: ModelLayout | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The state dict of the whole model, plain tensors in its own order. All ranks call it together.

    Args:
        model: as `auto_accelerate` returned it, which knows the rest, or as `tensor_parallel` split it.
        group: the ranks that it is split over, where their parts are plain tensors.
    """
    binding = getattr(model, "_atorch", None)
    layout = layout or getattr(binding, "layout", None)
    if binding is not None and binding.mesh is not None and layout is not None:
        group = binding.mesh.group("tensor")
    rows = {} if layout is None else layout.rows
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        state[name] = whole_tensor(value, rows.get(name), group)
    return state


def whole_tensor(tensor: Any, rows: Rows | None, group: dist.ProcessGroup | None) -> Tensor:
    """What is spread over ranks put together: a DTensor, or a plain part, whose place `rows` says, over `group`."""
    is_spread = hasattr(tensor, "full_tensor")
    whole: Tensor = tensor.full_tensor() if is_spread else tensor
    if rows is None:
        return whole
    if not is_spread:
        assert group is not None, "which other ranks have parts of it"
        whole = gather_rows(whole, rows, group)
    return in_own_order(whole, rows)


def gather_rows(part: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, rank after rank."""
    counts = [rows.count(rank) for rank in range(len(rows.by_rank))]
    turned = part.movedim(rows.dim, 0)
    padded = torch.cat([turned, turned.new_zeros(max(counts) - len(turned), *turned.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    rows_by_rank = [each[:count] for each, count in zip(parts, counts, strict=True)]
    return torch.cat(rows_by_rank).movedim(0, rows.dim).contiguous()


def in_own_order(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows that stand rank after rank, in the order of the whole."""
    if rows.is_in_order:
        return tensor
    order = torch.cat([rows.index(rank) for rank in range(len(rows.by_rank))]).to(tensor.device)
    return torch.empty_like(tensor).index_copy_(rows.dim, order, tensor)
