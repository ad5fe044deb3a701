"""Counts the collectives of a process while code runs, by kind and group, with their bytes.

Both families of torch's collectives pass the dispatcher: those of `torch.distributed` (FSDP2, DistributedDataParallel)
in the namespace c10d, and DTensor's functional ones in _c10d_functional. Bytes are those of the full payload: the
result of an all-gather, the input of a reduce-scatter, the tensor of any other collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.pytree import tensor_bytes, tensors_in

_RESULT = -1
_OPERATIONS: Mapping[str, tuple[str, int]] = {  # name → (kind, the argument that is the payload)
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", _RESULT),
    "all_gather_into_tensor_out": ("all_gather", _RESULT),
    "all_gather_into_tensor_coalesced": ("all_gather", _RESULT),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "shard_dim_alltoall": ("all_to_all", 0),
    "isend": ("send", 0),
    "irecv": ("receive", 0),
}
_NAMESPACES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"))

Counts = dict[tuple[str, str], tuple[int, float]]
"""(kind, group name) → (calls, bytes)."""


class CommCounter(TorchDispatchMode):
    """Counts the collectives called inside, in `counts`.

    Sums of integers are excluded: they are small agreements between processes, such as fsdp's on the order of passes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if name not in _OPERATIONS:
            return  # waiting, barriers
        kind, place = _OPERATIONS[name]
        payload = out if place == _RESULT else args[place]
        if kind == "all_reduce" and not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_in(payload)
        ):
            return
        num_bytes = sum(map(tensor_bytes, tensors_in(payload)))
        key = kind, _group_name(args, kwargs)
        calls, before = self.counts.get(key, (0, 0.0))
        self.counts[key] = calls + 1, before + num_bytes


def _group_name(args: Any, kwargs: Any) -> str:
    """The group among the arguments: an object in c10d, else the last string."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
            return group.group_name
    strings = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
    return strings[-1] if strings else ""
