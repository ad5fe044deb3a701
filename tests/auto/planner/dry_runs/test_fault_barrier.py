"""Processes that wait in kernels of NCCL, which nothing but an abort wakes: by a stand-in, over gloo."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from atorch.auto.planner.dry_runs.fault_barrier import EARLY_S, Coordinator, FaultBarrier
from atorch.distributed.barrier_diagnostics import MissingRanksError
from atorch.distributed.collectives import world_group
from atorch.distributed.mesh import Mesh, current, set_current
from atorch.distributed.world import World
from tests.pool import Pool, RankFailure, on_ranks

SLICES = (("tensor", 2), ("data", 2))
PATIENCE_S = 20.0  # of a test; the aborts come in a fraction of a second


class Kernels:
    """Collectives on a device: the host waits for them where no signal is handled, until their group is aborted."""

    def __init__(self) -> None:
        self._ended: dict[str, threading.Event] = {}
        self.hung = False  # whether one was never ended

    def _event(self, group: dist.ProcessGroup) -> threading.Event:
        return self._ended.setdefault(group.group_name, threading.Event())

    @property
    def aborted(self) -> set[str]:
        return {name for name, ended in self._ended.items() if ended.is_set()}

    def wait(self, group: dist.ProcessGroup) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        try:
            self._event(group).wait(PATIENCE_S)
        finally:
            self.hung = not self._event(group).is_set()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, groups are aborted in name, and what lies on a device lies on the host."""
        kernels, zeros = self, torch.zeros

        def abort(group: dist.ProcessGroup) -> None:
            kernels._event(group).set()

        def on_host(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            return zeros(*args, **kwargs)

        with mock.patch.object(dist.ProcessGroup, "abort", abort), mock.patch.object(torch, "zeros", on_host):
            yield


def make_mesh() -> list[str]:
    """The names of the candidate's groups: of all, and along each axis."""
    mesh = Mesh(SLICES, None, "cuda")
    set_current(mesh)
    found = [world_group(), mesh.group("tensor"), mesh.group("data")]
    return [each.group_name for each in found if each is not None]


@on_ranks(4, timeout=2 * PATIENCE_S)
def test_out_of_memory_on_one_rank_wakes_all_whichever_group_they_wait_in(rank: int, size: int) -> None:
    known = dist.distributed_c10d._world.pg_map
    failures, names, aborted, before = [], [], [], len(known)
    for _ in range(2):
        kernels, world = Kernels(), World(rank, size, rank, torch.device("cuda"))

        def step(kernels: Kernels = kernels) -> None:
            mesh = current()
            assert mesh is not None
            if rank == 3:
                raise torch.OutOfMemoryError("no room for what is gathered")
            kernels.wait(mesh.group({0: "tensor", 1: "data", 2: "tensor"}[rank]))

        coordinator = Coordinator(world)
        guard = FaultBarrier(world, coordinator, lambda: None, timeout_s=60, what="a phase")
        with kernels.on_device():
            made = guard.together(make_mesh)
            assert made is not None
            assert guard.together(step) is None
        coordinator.close()
        failures.append(guard.failure)
        names.append(made[rank])
        aborted.append(kernels.aborted)
    assert failures == ["OutOfMemoryError: no room for what is gathered (on rank 3)"] * 2
    assert aborted == [set(each) for each in names], "of all ranks, and along single axes"
    assert all(len(set(each)) == 3 for each in names)
    assert not set(names[0]) & set(names[1]), "a candidate's groups are its own"
    assert len(known) == before


@on_ranks(4, timeout=2 * PATIENCE_S)
def test_who_waits_for_each_other_is_woken_when_time_is_over(rank: int, size: int) -> None:
    """Each in a group of another axis: nobody fails, and nobody can be interrupted."""
    kernels, world = Kernels(), World(rank, size, rank, torch.device("cuda"))
    coordinator = Coordinator(world)

    def step() -> None:
        mesh = current()
        assert mesh is not None
        kernels.wait(mesh.group(("tensor", "data")[rank % 2]))

    with kernels.on_device():
        guard = FaultBarrier(world, coordinator, lambda: None, timeout_s=1.0, what="a phase")
        assert guard.together(make_mesh) is not None
        assert guard.together(step) is None
    coordinator.close()
    assert not kernels.hung
    assert "a peer failed, or was waited for too long" in str(guard.failure)


def timeout_of_group(rank: int, size: int) -> float:
    world = World(rank, size, rank, torch.device("cuda"))
    coordinator = Coordinator(world)
    made: Any = dist.new_group
    with mock.patch.object(dist, "new_group", side_effect=made) as called:
        guard = FaultBarrier(world, coordinator, lambda: None, timeout_s=180.0, what="a phase")
    guard.close()
    coordinator.close()
    return float(called.call_args.kwargs["timeout"].total_seconds())


def test_groups_connect_early_and_torch_would_end_the_process_late(pool: Pool) -> None:
    assert pool.run(timeout_of_group) == [180.0 + EARLY_S] * 2

    assert pool.run(connected, ranks=4) == [[]] * 4


def connected(rank: int, size: int) -> list[str]:
    """The groups that a candidate has used once it has made them."""
    used = []
    real: Any = dist.all_reduce

    def all_reduce(value: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        used.append(group.group_name)
        return real(value, *args, group=group, **kwargs)

    world = World(rank, size, rank, torch.device("cuda"))
    coordinator = Coordinator(world)
    guard = FaultBarrier(world, coordinator, lambda: None, timeout_s=60, what="a phase")
    with Kernels().on_device(), mock.patch.object(dist, "all_reduce", all_reduce):
        made = guard.together(make_mesh)
    assert made is not None
    guard.close()
    coordinator.close()
    return [each for each in made[rank][1:] if each not in used]


def abandoned(rank: int, size: int, folder: str) -> None:
    """Rank 1 computes without end."""
    world = World(rank, size, rank, torch.device("cpu"), timeout=timedelta(seconds=2))
    guard = FaultBarrier(world, Coordinator(world), lambda: None, timeout_s=1.0, what="the dry run of fsdp")
    try:
        guard.together(lambda: time.sleep(60) if rank == 1 else None)
    except MissingRanksError as error:
        Path(folder, "told").write_text(str(error))
        raise


def test_a_rank_that_does_not_come_back_is_named_with_the_work(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        pool.run(abandoned, str(tmp_path))
    assert "the dry run of fsdp did not end on all processes: rank 1 did not come" in (tmp_path / "told").read_text()
