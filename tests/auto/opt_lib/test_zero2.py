"""zero2 through the front door, with each of its backends."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from atorch.auto.opt_lib.zero2 import Zero2
from tests.auto.opt_lib.sharing_job import accelerated
from tests.auto.training import run_each
from tests.pool import Pool


def gathers(rank: int, size: int, name: str) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    result = accelerated([name], "llama")
    batch = next(iter(result.dataloader))
    result.loss_func(batch, result.model(batch)).backward()
    with CommDebugMode() as seen:
        result.loss_func(batch, result.model(batch)).backward()
    return sum(count for op, count in seen.get_comm_counts().items() if "allgather" in str(op).replace("_", ""))


def test_parameters_are_gathered_once_a_step(pool: Pool) -> None:
    """fsdp gathers its two blocks a second time in backward."""
    (of_fsdp, _), (of_zero2, _) = run_each(pool, gathers, [("fsdp",), ("zero2",)])
    assert of_fsdp == of_zero2 + 2


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (None, "fsdp"),
        ({"use_ds_zero": True}, "deepspeed"),
        ({"not_use_fsdp": True}, "fairscale"),
        ({"not_use_fsdp": False, "forward_prefetch": True}, "fsdp"),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "cpu_offload": True}, "fsdp"),
    ],
)
def test_documented_configurations(config: Any, backend: str) -> None:
    method = Zero2.of(config)
    assert method.backend == backend
    assert method.reshard_after_forward is False
    assert Zero2.of(method.model_dump(mode="json", exclude_unset=True)) == method
