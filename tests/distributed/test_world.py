"""Devices that NCCL or hosts cannot reach, the end of a job, records of collectives, and a world of fakes."""

import json
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch.distributed import world
from atorch.distributed.collectives import from_rank_zero, gather_objects
from atorch.distributed.local_collectives import FakeRun, fake_world
from atorch.distributed.mesh import Mesh
from atorch.errors import ArgumentError, CapabilityError
from atorch.logs import logger
from atorch.model.copy import copy_structure
from atorch.profiler.memory_tracker import CommCounter
from tests.pool import on_ranks

BOTH = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("config", "second", "message"),
    [
        (BOTH, "one", "ranks 0, 1 share a CUDA device, and NCCL takes one process a device: 2 processes"),
        ("cpu:gloo,cuda:gloo", "one", ""),
        (BOTH, "other", ""),
        ("cuda:nccl", "other", "and processes also communicate over hosts; leave the backend out, or give"),
    ],
)
@on_ranks(2)
def test_devices_that_nccl_cannot_share_and_hosts_it_cannot_reach(
    rank: int, size: int, config: str, second: str, message: str
) -> None:
    """Each process sees the device of its rank alone."""
    devices = ["one", second]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(size))
        patch.setattr(dist, "get_backend_config", lambda: config)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=devices[rank]))
        with pytest.raises(world.ArgumentError, match=message) if message else nullcontext():
            world._check_devices(torch.device("cuda", 0))


def test_the_end_of_a_job_ends_what_it_did_to_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "atorch"):
        with fake_world(2, rank=1):
            world.init("cpu")
            logger.warning("rank 0 says it")
        logger.warning("after the job")
    assert caplog.messages == ["after the job"]


def started(store: dist.Store, ranks: list[int], timeout_s: float = 20.0) -> list[str]:
    """Errors of some of three ranks, or if they find what rank 0 writes, and nothing older."""
    written = secrets.token_hex(8)

    def start(rank: int) -> str:
        try:
            mine = world.start_store(store, rank, 3, timedelta(seconds=timeout_s))
        except world.ArgumentError as error:
            return str(error)
        if rank == 0:
            mine.set("address", written)
        mine.wait(["address"], timedelta(seconds=20))
        return "new" if mine.get("address").decode() == written else "old"

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(start, ranks))


def test_a_start_sees_nothing_of_an_earlier_one() -> None:
    """Also where the last one ended within its start, and left any of its keys."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    assert started(store, [0, 1, 2]) == ["new"] * 3
    for left in ([1, 2], [0, 1]):
        started(store, left, 0.2)
        assert started(store, [2, 0, 1]) == ["new"] * 3


def test_a_start_names_the_missing() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    started(store, [0, 1, 2])
    for error in started(store, [0, 1], 0.3):
        assert "waited 0.3 s for rank 2; look there" in error
    for error in started(store, [1, 2], 0.3):
        assert "for rank 0 (" in error


@on_ranks(2)
def test_torch_records_the_last_collectives_without_a_setting(rank: int, size: int) -> None:
    """The page on large jobs reads a hang from them; over NCCL torch also writes them to a file."""
    dist.all_reduce(torch.ones(rank + 3, 2)[:3])
    entry = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"][-1]
    assert (entry["profiling_name"], entry["input_sizes"][0]) == ("gloo:all_reduce", [3, 2])


@on_ranks(2)
def test_who_leaves_waits_until_gloos_threads_have_let_go(rank: int, size: int) -> None:
    """Of a group that something still holds."""
    held = dist.group.WORLD
    dist.all_reduce(torch.ones(2), group=held)
    assert world._states_of_threads("pt_gloo_runloop"), "gloo has another name for them"
    assert world._states_of_threads("no such") == set()
    world._leave()
    found = world._states_of_threads("pt_gloo_runloop")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool ends one
    assert found == {"S"}


def test_a_world_of_any_size_ends_with_its_context() -> None:
    with fake_world(1024, rank=1000) as world:
        assert (world.rank, world.size, dist.get_world_size()) == (1000, 1024, 1024)
        mesh = Mesh((("zero", 8), ("data", 128)), None, "cpu")
        assert mesh.rank("zero") == 0
        assert mesh.axes_of(mesh.group("zero").group_name) == ("zero",)
        assert mesh.axes_of(mesh.group("zero", "data").group_name) == ("zero", "data")
        assert gather_objects("here")[-1] == "here"
        assert from_rank_zero("here") == "here"
    assert not dist.is_initialized()


def test_a_rank_must_be_one_and_a_real_group_stays() -> None:
    with pytest.raises(ArgumentError, match="ranks are 0 to 7"), fake_world(8, rank=8):
        pass
    with fake_world(2), pytest.raises(CapabilityError, match="has a group of 2"), fake_world(4):
        pass
    assert not dist.is_initialized()


def test_small_whole_numbers_are_real_and_the_rest_is_not() -> None:
    fake_run = FakeRun()
    weight = fake_run.fake(torch.empty(4, 4, device="meta"))
    with fake_run, fake_run.stepping():
        positions = torch.arange(8)[None]
        assert not isinstance(positions, FakeTensor)
        assert bool((positions.diff() == 1).all())
        assert isinstance(torch.zeros(4), FakeTensor)
        assert isinstance(torch.arange(2**11)[None] < torch.arange(2**11)[:, None], FakeTensor), "it is large"
        assert isinstance(weight @ torch.ones(4), FakeTensor)
        step = torch.tensor(0.0)
        step += 1
        assert step.item() == 1


def test_questions_to_fakes_have_the_answer_of_a_good_step() -> None:
    fake_run = FakeRun()
    weight = fake_run.fake(torch.empty(4, 4, device="meta"))
    with fake_run, fake_run.stepping():
        assert bool(torch.isfinite(weight).all())
        assert torch.equal(weight, weight + 1)
        assert float(weight.sum()) == 1


def test_a_module_of_fakes_can_be_cast_and_replicated() -> None:
    fake_run, sent = FakeRun(), CommCounter()
    with fake_run:
        model = copy_structure(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fake_run.fake).bfloat16()
    with fake_world(4), fake_run:
        replicas = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        with fake_run.stepping(), sent:
            for _ in range(3):
                sent.counts.clear()
                replicas(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert list(sent.counts.values()) == [(1, 2 * 40)]
    assert {kind for kind, _ in sent.counts} == {"all_reduce"}
