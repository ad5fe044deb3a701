"""zero2 through the front door, with each of its backends."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from atorch.auto.opt_lib.zero2 import Zero2
from atorch.errors import StrategyError
from tests.auto.opt_lib.sharing_job import accelerated, deviation
from tests.pool import Pool


@pytest.mark.parametrize("name", ["awkward", "llama", "lora"])
@pytest.mark.parametrize("config", [None, {"not_use_fsdp": True}])
def test_trains_and_clips_as_one_process_does(pool: Pool, config: Any, name: str) -> None:
    assert max(pool.run(deviation, [("zero2", config)], name, True)) <= 1e-4


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
    assert pool.run(gathers, "fsdp")[0] == pool.run(gathers, "zero2")[0] + 2


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"not_use_fsdp", True}, "write the dict {'not_use_fsdp': True}"),
        ({"not_use_fsdp": True, "use_ds_zero": True}, "give one"),
        ({"not_use_fsdp": True, "atorch_wrap_cls": "Block"}, "atorch_wrap_cls are fsdp's"),
        ({"sharding_strategy": "FULL_SHARD"}, "use fsdp"),
        ({"reshard_after_forward": True}, "use fsdp"),
    ],
)
def test_what_does_not_hold_is_refused(config: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Zero2.of(config)
