"""The parameters of a split model as they stand in the whole one, stages of a pipeline put together.

What a rank holds are rows in the ranks' order. Where a fused projection was cut, that is not the model's order, and
depends on the number of ranks: what is saved for others, or for another number of ranks, is saved from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import everyone, meet, nobody_else
from atorch.errors import ArgumentError
from atorch.runtime.fsdp.partial_state_dict import own_state
from atorch.runtime.tensor_parallel.layout.layout import Rows
from atorch.runtime.tensor_parallel.layout.model_layout import ModelLayout


@torch.no_grad()
def whole_state(
    model: nn.Module, layout: ModelLayout | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The state dict of the whole model, plain tensors in its own order, on every rank. All ranks call it together.

    Args:
        model: as `auto_accelerate` returned it, which knows the rest, or as `tensor_parallel` split it.
        group: the ranks that it is split over, where their parts are plain tensors.

    Raises:
        ArgumentError: what is given is no module; some ranks did not call it, and are named.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"whole_state was given a {type(model).__name__}; give the model that auto_accelerate returned: "
            "result.model. What is saved of an optimizer comes from torch.distributed.checkpoint.state_dict"
        )
    binding = getattr(model, "_atorch", None)
    mesh: Any = getattr(binding, "mesh", None)
    layout = layout or getattr(binding, "layout", None)
    if mesh is not None and layout is not None:
        group = mesh.group("tensor")
    rows = {} if layout is None else layout.rows
    held = own_state(model)
    stages = mesh.group("pipeline") if mesh is not None and mesh.size("pipeline") > 1 else None
    everybody = everyone()
    if everybody is not None and (rows or stages or any(hasattr(each, "full_tensor") for each in held.values())):
        meet("whole_state", everybody)
    state: dict[str, Tensor] = {}
    for name, value in held.items():
        state[name] = whole_tensor(value, rows.get(name), group)
    return state if stages is None else of_all_stages(state, getattr(model, "state_names", ()), stages)


def of_all_stages(state: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The states of all ranks of a pipeline as one; what several have is the first one's.

    names: the order, of those that are known.
    """
    if nobody_else():
        return dict(state)
    own = {name: (each.shape, each.dtype, each.device.type) for name, each in state.items() if hasattr(each, "shape")}
    held: list[Any] = [None] * group.size()
    dist.all_gather_object(held, own, group=group)
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys((*names, *(name for each in held for name in each))):
        place = next((place for place, each in enumerate(held) if name in each), None)
        if place is not None:
            shape, dtype, device = held[place][name]
            tensor = (
                state[name].contiguous() if place == group.rank() else torch.empty(shape, dtype=dtype, device=device)
            )
            dist.broadcast(tensor, group=group, group_src=place)
            found[name] = tensor
    return {**found, **{name: value for name, value in state.items() if name not in found}}


def whole_tensor(tensor: Any, rows: Rows | None, group: dist.ProcessGroup | None) -> Tensor:
    """A spread tensor put together: a DTensor, or a plain part, whose place `rows` says, over `group`."""
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
