"""The whole model's parameters, from a split model and from all stages of a pipeline.

Ranks hold rows in rank order. For a cut fused projection that is not the model's order, and it depends on the number of
ranks. Checkpoints for other programs, or for another number of ranks, are saved from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import checked_barrier, gather_objects, is_fake_world, world_group
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
        model: as returned by `auto_accelerate`, which holds the rest, or as split by `tensor_parallel`.
        layout: how `tensor_parallel` split it; None if `auto_accelerate` did, which keeps it.
        group: the ranks that it is split over, if their parts are plain tensors.

    Raises:
        ArgumentError: `model` is no module, or some ranks, which are named, did not call it.
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
    local = own_state(model)
    stages = mesh.group("pipeline") if mesh is not None and mesh.size("pipeline") > 1 else None
    all_ranks = world_group()
    if all_ranks is not None and (rows or stages or any(hasattr(value, "full_tensor") for value in local.values())):
        checked_barrier("whole_state", all_ranks)
    state: dict[str, Tensor] = {}
    for name, value in local.items():
        state[name] = whole_tensor(value, rows.get(name), group)
    return state if stages is None else of_all_stages(state, getattr(model, "state_names", ()), stages)


def of_all_stages(state: Mapping[str, Tensor], names: Sequence[str], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The states of all ranks of a pipeline as one; for names that several have, the first rank's tensor.

    names: the first names of the result, in order.
    """
    if is_fake_world():
        return dict(state)
    specs = {name: (item.shape, item.dtype, item.device.type) for name, item in state.items() if hasattr(item, "shape")}
    stage_specs = gather_objects(specs, group)
    merged: dict[str, Tensor] = {}
    for name in dict.fromkeys((*names, *(name for stage in stage_specs for name in stage))):
        rank = next((rank for rank, stage in enumerate(stage_specs) if name in stage), None)
        if rank is not None:
            shape, dtype, device = stage_specs[rank][name]
            tensor = (
                state[name].contiguous() if rank == group.rank() else torch.empty(shape, dtype=dtype, device=device)
            )
            dist.broadcast(tensor, group=group, group_src=rank)
            merged[name] = tensor
    return {**merged, **{name: value for name, value in state.items() if name not in merged}}


def whole_tensor(tensor: Any, rows: Rows | None, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor gathered from its parts: a DTensor, or a plain part with the ranks' `rows` over `group`."""
    is_spread = hasattr(tensor, "full_tensor")
    whole: Tensor = tensor.full_tensor() if is_spread else tensor
    if rows is None:
        return whole
    if not is_spread:
        assert group is not None, "which other ranks have parts of it"
        whole = gather_rows(whole, rows, group)
    return in_own_order(whole, rows)


def gather_rows(part: Tensor, rows: Rows, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in rank order."""
    counts = [rows.count(rank) for rank in range(len(rows.by_rank))]
    rows_first = part.movedim(rows.dim, 0)
    padded = torch.cat([rows_first, rows_first.new_zeros(max(counts) - len(rows_first), *rows_first.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    rows_by_rank = [gathered[:count] for gathered, count in zip(parts, counts, strict=True)]
    return torch.cat(rows_by_rank).movedim(0, rows.dim).contiguous()


def in_own_order(tensor: Tensor, rows: Rows) -> Tensor:
    """A tensor with rows in rank order, reordered as in the whole."""
    if rows.is_in_order:
        return tensor
    order = torch.cat([rows.index(rank) for rank in range(len(rows.by_rank))]).to(tensor.device)
    return torch.empty_like(tensor).index_copy_(rows.dim, order, tensor)
