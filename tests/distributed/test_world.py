"""Processes on CUDA devices: refused where NCCL would hang or the host could not be reached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from atorch.distributed import world
from tests.pool import Pool

BOTH = "cpu:gloo,cuda:nccl"


def told(rank: int, size: int, config: str, devices: list[str]) -> str:
    """What a process is told whose one visible device is that of its rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(size))
        patch.setattr(dist, "get_backend_config", lambda: config)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=devices[rank]))
        try:
            world._check_devices(torch.device("cuda", 0))
        except world.ArgumentError as error:
            return str(error)
    return ""


def test_processes_that_share_a_device_are_told_so(pool: Pool) -> None:
    for message in pool.run(told, BOTH, ["one", "one"]):
        assert message.startswith("ranks 0, 1 share a CUDA device, and NCCL takes one process a device: 2 processes")
    assert pool.run(told, "cpu:gloo,cuda:gloo", ["one", "one"]) == ["", ""]


def test_each_process_may_see_a_device_of_its_own_alone(pool: Pool) -> None:
    assert pool.run(told, BOTH, ["one", "other"]) == ["", ""]


def test_a_group_of_nccl_alone_cannot_reach_the_hosts(pool: Pool) -> None:
    for message in pool.run(told, "cuda:nccl", ["one", "other"]):
        assert "alone, and processes decide together over hosts; leave the backend out, or give" in message
