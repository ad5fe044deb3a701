"""Parameters and states that the replicas of a model share out, put together and taken apart again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atorch.distributed.collectives import meet
from atorch.smp.checkpointing.whole_states import PATIENCE
from atorch.smp.session import session


def meet_replicas(call: str, *, states: bool = True) -> bool:
    """Wait, where replicas share something out, until all processes make this call, which puts it together.

    states: of the optimizer, which they may share alone.

    Returns whether they do.

    Raises:
        ArgumentError: some did not come, and are named.
    """
    owner = session()
    if not ((states and owner.config.shard_optimizer_state) or owner.config.sharded_data_parallel_degree > 1):
        return False
    meet(call, owner.mesh.group("data", "zero", "pipeline", "tensor"), longest=PATIENCE)
    return True


def whole_over_shards(held: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors whose shards several processes have, whole. All of these call it together."""
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in held.items()}


def shards_like(parameter: Tensor, held: Mapping[str, Any]) -> dict[str, Any]:
    """This process's part of tensors that are as large as the whole parameter, and all others as they are."""
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
