"""State dicts in parts: each of several processes saves and loads its part of a model whose chunks are sharded.

A process saves, whole, every parameter that overlaps its shards; one at the border of two shards is saved by both
processes. The union of all parts is the whole state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import all_or_none, gather_objects, world_group
from atorch.errors import shown
from atorch.runtime.chunk.operations import Operations


@torch.no_grad()
def own_part(state: dict[str, Any], operations: Operations) -> dict[str, Any]:
    """The part of a state that this process saves, in fp32 on the host; parameters in `state` are the model's objects.

    Other tensors are rank 0's. All processes must call it: chunks are gathered one by one.
    """
    chunks = operations.chunks
    placed = ((value, chunks.place(value)) for value in state.values() if isinstance(value, Tensor))
    managed = {parameter: place for parameter, place in placed if place is not None}
    local: dict[Tensor, Tensor] = {}
    for memory in chunks.chunks:
        with operations.gathering():  # the values of one chunk at a time
            for parameter, (holder, slot) in managed.items():
                if holder is memory:
                    whole, overlap = parameter.detach(), memory.within(slot)
                    if overlap.start < overlap.stop:
                        local[parameter] = whole.clone()
    part = type(state)()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            part[name] = value
        elif value in local:
            part[name] = local[value]
        elif isinstance(value, nn.Parameter) and value not in managed:
            part[name] = value.detach()  # the same on all
        elif value not in managed:
            part[name] = _broadcast(value.detach(), 0, chunks.device)
    return part


@torch.no_grad()
def load_parts(model: nn.Module, state: Mapping[str, Any], strict: bool, device: torch.device) -> Any:
    """Load this process's part of a state, and receive the rest from the others. All processes must call it.

    Returns, as `Module.load_state_dict`, the keys that no process has, and those that are not the model's.

    Raises:
        RuntimeError: there are such keys and `strict` is set, or a shape differs.
    """
    result = all_or_none(lambda: model.load_state_dict(state, strict=False))
    missing_by_rank = gather_objects(set(result.missing_keys))
    targets = model.state_dict(keep_vars=True)
    for name in sorted(set.union(*missing_by_rank)):
        sources = [rank for rank, names in enumerate(missing_by_rank) if name not in names]
        if sources and isinstance(targets[name], Tensor):
            target = targets[name]
            dtype = torch.float32 if target.is_floating_point() else target.dtype
            value = state[name].to(dtype) if name in state else torch.empty(target.shape, dtype=dtype)
            target.copy_(_broadcast(value, sources[0], device))
    missing = [name for name in result.missing_keys if all(name in names for names in missing_by_rank)]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"the state does not fit {type(model).__name__}: no process has {shown(missing)}, and "
            f"{shown(result.unexpected_keys)} are not the model's; load what an engine of this model has saved, or "
            "pass strict=False"
        )
    return type(result)(missing, result.unexpected_keys)


def _broadcast(tensor: Tensor, rank: int, device: torch.device) -> Tensor:
    moved = tensor.to(device).contiguous()
    dist.broadcast(moved, src=rank, group=world_group())
    return moved.to(tensor.device)
