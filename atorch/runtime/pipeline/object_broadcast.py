"""Broadcasts nested data over a group: the structure as an object, then tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from atorch.distributed.collectives import is_fake_world
from atorch.model.pytree import map_leaves
from atorch.runtime.pipeline.capture.shapes import TensorSpec, shape_of


def from_place(data: Any, place: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Broadcast `data` from rank `place` of the group; returns it with detached tensors.

    In a fake world returns this process's data.
    """
    is_source = group.rank() == place
    tensors: list[torch.Tensor] = []

    def leave_out(leaf: Any, where: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf.detach().contiguous())
        return _Place(shape_of(leaf))

    box = [map_leaves(leave_out, data)]
    if not is_fake_world():
        dist.broadcast_object_list(box, group=group, group_src=place, device=_for_objects(device, group))
    waiting = iter(tensors)

    def receive(leaf: Any, where: str) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        sizes, dtype = leaf.shape
        tensor = next(waiting) if is_source else torch.empty(sizes, dtype=dtype, device=device)
        dist.broadcast(tensor, group=group, group_src=place)
        return tensor

    return map_leaves(receive, box[0])


class _Place:
    def __init__(self, shape: TensorSpec) -> None:
        self.shape = shape


def _for_objects(device: torch.device, group: dist.ProcessGroup) -> torch.device | None:
    return device if dist.get_backend(group) == "nccl" else None
