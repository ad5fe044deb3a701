"""What processes are told and what they keep: devices that NCCL or hosts cannot reach, connections, collectives."""

from __future__ import annotations

import json
import logging
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from atorch.distributed import world
from atorch.distributed.local_collectives import fake_world
from atorch.logs import logger
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


@pytest.mark.parametrize(
    ("config", "second", "message"),
    [
        (BOTH, "one", "ranks 0, 1 share a CUDA device, and NCCL takes one process a device: 2 processes"),
        ("cpu:gloo,cuda:gloo", "one", ""),
        (BOTH, "other", ""),
        ("cuda:nccl", "other", "alone, and processes decide together over hosts; leave the backend out, or give"),
    ],
)
def test_devices_that_nccl_cannot_share_and_hosts_it_cannot_reach(
    pool: Pool, config: str, second: str, message: str
) -> None:
    for found in pool.run(told, config, ["one", second]):
        assert message in found if message else not found


def test_the_end_of_a_job_ends_what_it_did_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "atorch"):
        with fake_world(2, rank=1):
            world.init("cpu")
            logger.warning("rank 0 says it")
        logger.warning("after the job")
    assert caplog.messages == ["after the job"]


def sockets_of_a_group(rank: int, size: int, lazy: str) -> tuple[int, int]:
    """How many sockets this process has more for a group of all: once it is made, once it was used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
        dist.barrier()  # which connects what the next one needs
        before = num_sockets()
        group = dist.new_group(list(range(size)))
        made = num_sockets()
        dist.barrier()  # a quick process's broadcast would connect to one that still counts
        dist.broadcast(torch.zeros(1), 0, group=group)
        used = num_sockets()
    dist.barrier()  # who is done early keeps its sockets until the others have counted theirs
    return made - before, used - before


def num_sockets() -> int:
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def last_recorded(rank: int, size: int) -> tuple[str, list[int]]:
    """What torch's flight recorder has of a process's last collective."""
    dist.all_reduce(torch.ones(rank + 3, 2)[:3])
    entry = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"][-1]
    return entry["profiling_name"], entry["input_sizes"][0]


def test_torch_records_the_last_collectives_without_a_setting(pool: Pool) -> None:
    """The page on large jobs reads a hang from them; over NCCL torch also writes them to a file."""
    assert pool.run(last_recorded) == [("gloo:all_reduce", [3, 2])] * 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the descriptors that Linux shows")
def test_gloo_connects_all_with_all_unless_it_is_told_to_wait(pool: Pool) -> None:
    eager = pool.run(sockets_of_a_group, "0", ranks=4)
    lazy = pool.run(sockets_of_a_group, "1", ranks=4)
    assert all(made >= 3 for made, _ in eager), eager  # each with each other one
    assert all(made <= 1 for made, _ in lazy), lazy  # it listens at most
    assert sum(used for _, used in lazy) < sum(used for _, used in eager), (lazy, eager)  # what a broadcast needs


def left(rank: int, size: int) -> tuple[set[str], set[str]]:
    """The states of gloo's threads of a group that something still holds, before and after a process leaves."""
    held = dist.group.WORLD
    dist.all_reduce(torch.ones(2), group=held)
    threads = [world._states_of_threads(each) for each in ("pt_gloo_runloop", "no such")]
    world._leave()
    found = world._states_of_threads("pt_gloo_runloop")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool ends one
    assert threads[0], "gloo has another name for them"
    return threads[1], found


def test_who_leaves_waits_until_gloos_threads_have_let_go(pool: Pool) -> None:
    assert pool.run(left) == [(set(), {"S"})] * 2
