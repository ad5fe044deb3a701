"""State dicts in parts: what each of several processes saves of a model whose chunks they share, and loads again.

A process saves, whole, every parameter of which it has some elements; where a chunk is cut through a parameter, two
processes save it alike. An update of one dict with all parts is the whole state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import everyone, gather_objects, together
from atorch.errors import shown
from atorch.runtime.chunk.operations import Operations


@torch.no_grad()
def own_part(state: dict[str, Any], operations: Operations) -> dict[str, Any]:
    """The part of a state, whose parameters are the model's own objects, that this process saves: fp32, on the host.

    Tensors that are no parameters are those of rank 0. All processes must call it: chunks are gathered one by one.
    """
    chunks = operations.chunks
    placed = ((each, chunks.place(each)) for each in state.values() if isinstance(each, Tensor))
    managed = {parameter: place for parameter, place in placed if place is not None}
    mine: dict[Tensor, Tensor] = {}
    for memory in chunks.chunks:
        with operations.gathering():  # the values of one chunk at a time
            for parameter, (holder, slot) in managed.items():
                if holder is memory:
                    whole, held = parameter.detach(), memory.within(slot)
                    if held.start < held.stop:
                        mine[parameter] = whole.clone()
    part = type(state)()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            part[name] = value
        elif value in mine:
            part[name] = mine[value]
        elif isinstance(value, nn.Parameter) and value not in managed:
            part[name] = value.detach()  # the same on all
        elif value not in managed:
            part[name] = _sent(value.detach(), 0, chunks.device)
    return part


@torch.no_grad()
def load_parts(model: nn.Module, state: Mapping[str, Any], strict: bool, device: torch.device) -> Any:
    """Load what this process has of a state, and what it lacks from those that have it. All processes must call it.

    Returns what `Module.load_state_dict` does: the keys that nobody has, and those that are not the model's.

    Raises:
        RuntimeError: there are such keys, and `strict`; or a shape differs.
    """
    found = together(lambda: model.load_state_dict(state, strict=False))
    lacking = gather_objects(set(found.missing_keys))
    targets = model.state_dict(keep_vars=True)
    for name in sorted(set.union(*lacking)):
        having = [rank for rank, names in enumerate(lacking) if name not in names]
        if having and isinstance(targets[name], Tensor):
            target = targets[name]
            dtype = torch.float32 if target.is_floating_point() else target.dtype
            value = state[name].to(dtype) if name in state else torch.empty(target.shape, dtype=dtype)
            target.copy_(_sent(value, having[0], device))
    missing = [name for name in found.missing_keys if all(name in names for names in lacking)]
    if strict and (missing or found.unexpected_keys):
        raise RuntimeError(
            f"the state does not fit {type(model).__name__}: no process has {shown(missing)}, and "
            f"{shown(found.unexpected_keys)} are not the model's; load what an engine of this model has saved, or "
            "pass strict=False"
        )
    return type(found)(missing, found.unexpected_keys)


def _sent(tensor: Tensor, rank: int, device: torch.device) -> Tensor:
    """The tensor of that rank, on every process, where it was; sent over what `device` is linked by."""
    sent = tensor.to(device).contiguous()
    dist.broadcast(sent, src=rank, group=everyone())
    return sent.to(tensor.device)
