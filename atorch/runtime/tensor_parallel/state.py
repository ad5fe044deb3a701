"""The parameters of a split model as they stand in the whole one.

A DTensor's `full_tensor()` has the rows in the ranks' order. Where a fused projection was cut, that is not the model's
order, and depends on the number of ranks: what is saved for others, or for another number of ranks, is saved from here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.layout import Rows
from atorch.runtime.tensor_parallel.split import ModelLayout


@torch.no_grad()
def whole_state(model: nn.Module, layout: ModelLayout) -> dict[str, Tensor]:
    """The state dict of the whole model, plain tensors in its own order. All ranks call it together."""
    rows = layout.rows
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensor: Any = value
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state[name] = in_own_order(full, rows[name]) if name in rows else full
    return state


def in_own_order(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows that stand rank after rank, in the order of the whole."""
    if rows.is_in_order:
        return tensor
    order = torch.cat([rows.index(rank) for rank in range(len(rows.by_rank))]).to(tensor.device)
    return torch.empty_like(tensor).index_copy_(rows.dim, order, tensor)
