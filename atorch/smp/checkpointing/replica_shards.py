"""Gathers and shards parameters and states that are sharded over the replicas of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atorch.distributed.collectives import checked_barrier
from atorch.smp.checkpointing.whole_states import PATIENCE
from atorch.smp.session import session


def meet_replicas(call: str, *, states: bool = True) -> bool:
    """Wait for all processes to make this call if replicas shard what it gathers; returns True if they do.

    states: the call gathers optimizer states, which replicas may shard without the parameters.

    Raises:
        ArgumentError: some did not make the call; the error lists them.
    """
    owner = session()
    if not ((states and owner.config.shard_optimizer_state) or owner.config.sharded_data_parallel_degree > 1):
        return False
    checked_barrier(call, owner.mesh.group("data", "zero", "pipeline", "tensor"), longest=PATIENCE)
    return True


def whole_over_shards(held: Mapping[str, Any]) -> dict[str, Any]:
    """Gather sharded tensors; all processes with shards call it together."""
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in held.items()}


def shards_like(parameter: Tensor, held: Mapping[str, Any]) -> dict[str, Any]:
    """Shard tensors of a parameter's whole shape as the parameter; others are returned unchanged."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return dict(held)
    from torch.distributed.tensor import distribute_tensor

    return {
        key: distribute_tensor(value.to(parameter.device), mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in held.items()
    }
