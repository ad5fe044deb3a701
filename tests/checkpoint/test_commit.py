"""Saves that stop, fail or are killed: the newest complete checkpoint is whole at every moment."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import random
import signal
import struct
import threading
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atorch.checkpoint import files
from atorch.checkpoint.commit import steps
from atorch.checkpoint.files import BackgroundWriter, save
from atorch.checkpoint.reading import Checkpoint
from atorch.errors import CheckpointError
from tests.checkpoint.jobs import Ranks, save_state, saved_number, whole
from tests.checkpoint.test_files import share
from tests.pool import IMPORTED

CALLS = ("rename", "replace", "unlink", "rmdir", "fsync")
JOBS = pytest.mark.parametrize(
    ("step", "ranks", "background"),
    [(4, 1, False), (3, 1, False), (3, 2, True)],
    ids=["a new step", "the same step again", "the same step again, on two in the background"],
)


class Stop(BaseException):
    """The process is gone: nothing catches this."""


class Stopping:
    """Functions of `os` that count their calls, and end at one of them; after a stop, so does each later one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.number, self._at, self._error = 0, at, error
        for name in (*CALLS, "stat"):  # what waits for a rank that is gone looks for its files
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), number=int(name in CALLS)))

    def _wrapped(self, function, number: int):
        def call(*args, **options):
            self.number += number
            is_stopped = self.number >= self._at and isinstance(self._error, Stop)
            if (number and self.number == self._at) or is_stopped:
                raise self._error
            return function(*args, **options)

        return call


def interrupted(
    folder: Path, step: int, number: int, at: int, error: BaseException, *, ranks: int, background: bool
) -> bool:
    """Save `state(number)`, ending at a call of `os`; False if there are fewer calls."""

    def work(rank: int) -> None:
        writer = BackgroundWriter() if background else None
        save_state(folder, step, number, keep_last=2, background=writer)
        if writer is not None:
            files.all_or_none(writer.wait)

    with pytest.MonkeyPatch.context() as patch:
        stopping = Stopping(patch, at, error)
        try:
            errors = Ranks(ranks).run(work) if ranks > 1 else [work(0)]
        except (Stop, CheckpointError, threading.BrokenBarrierError):
            return True
    told = [isinstance(result, CheckpointError) for result in errors]
    assert all(told) == any(told) == (stopping.number >= at)
    return any(told)


@JOBS
def test_a_process_that_stops_before_any_call(tmp_path: Path, step: int, ranks: int, background: bool) -> None:
    at = 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        for earlier in (2, 3):
            save_state(folder, earlier)
        stopped = interrupted(folder, step, 100, at, Stop(), ranks=ranks, background=background)
        found = saved_number(folder)
        assert found in (3, 100)
        assert [saved_number(folder, other) for other in steps(folder)][-1] == found
        if not stopped:
            break
        save_state(folder, 9, keep_last=2)  # removes what was left, whatever it was
        assert saved_number(folder) == 9
        assert saved_number(folder, steps(folder)[0]) in (3, 100)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["newest", *(f"step-{other:09}" for other in steps(folder))]
        assert len(steps(folder)) == 2
    assert found == 100
    assert at > 9


@JOBS
def test_a_call_that_fails(tmp_path: Path, step: int, ranks: int, background: bool) -> None:
    """A full disk: the error is told, and the old checkpoint stands, unless the new one is complete."""
    at = 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        save_state(folder, 3)
        error = OSError(errno.ENOSPC, "No space left on device")
        if not interrupted(folder, step, 100, at, error, ranks=ranks, background=background):
            break
        assert saved_number(folder) in (3, 100)
        assert not list(folder.glob(".*.part/manifest.json")) or step in steps(folder)
        save_state(folder, 9)
        assert saved_number(folder) == 9
    assert saved_number(folder) == 100


def test_a_rank_that_stalls_in_the_background_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 1)
    given_up, write = threading.Event(), files.write_shard
    monkeypatch.setattr(files, "TIMEOUT", timedelta(seconds=0.2))
    monkeypatch.setattr(
        files,
        "write_shard",
        lambda path, *args: (path.stem == "rank-00000" or given_up.wait(60), write(path, *args))[1],
    )

    def work(rank: int) -> None:
        writer = BackgroundWriter()
        save(tmp_path, 2, {"w": share(rank, 2, torch.ones(4, 3))}, {}, background=writer)
        try:
            writer.wait()
        finally:
            given_up.set()

    errors = Ranks(2).run(work)
    assert "rank 1 has written nothing for 0:00:00.2" in str(errors[0])
    assert isinstance(errors[1], CheckpointError)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["newest", "step-000000001"]


def test_the_background_leaves_the_processor_until_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = BackgroundWriter()
    monkeypatch.setattr(files, "_SHARE", 1e-9)
    save_state(tmp_path, 1, background=writer)
    time.sleep(0.2)
    assert steps(tmp_path) == []
    writer.wait()
    assert steps(tmp_path) == [1]


def test_a_full_disk_is_told_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, 1)
    values = torch.ones(4, 3)

    def no_space(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", no_space)
    errors = Ranks(2).run(lambda rank: save(tmp_path, 2, {"w": share(rank, 2, values)}, {}))
    assert all("cannot be written: No space left on device; earlier" in str(error) for error in errors)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["newest", "step-000000001"]
    assert saved_number(tmp_path) == 1


def test_folders_that_cannot_hold_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot hold a checkpoint: "):
        save_state(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="cannot hold a checkpoint: "):
        save_state(Path("/proc/none"), 1)
    read_only = Ranks(2).run(lambda rank: save("/proc/none", 1, {"w": whole(torch.ones(2))}, {}))
    assert all("/proc/none cannot hold a checkpoint: " in str(error) for error in read_only)
    with pytest.raises(CheckpointError, match="file cannot be read: Not a directory$"):
        steps(tmp_path / "file")


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    others = ["notes.txt", "step-1", "step-00000001x", ".step-000000001.part", "step-000000005", ".step-000000006.old"]
    for name in others[1:]:
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("x")
    save_state(tmp_path, 2, keep_last=1)
    assert steps(tmp_path) == [2]
    with pytest.raises(CheckpointError, match="step-000000005 exists and is not a checkpoint"):
        save_state(tmp_path, 5)
    with pytest.raises(CheckpointError, match="step-000000002 is a checkpoint itself"):
        save_state(tmp_path / "step-000000002", 3)
    assert {path.name for path in tmp_path.iterdir()} >= set(others[:5])


def saving(rank: int, size: int, folder: str, shared: str, same_step: bool, background: bool) -> None:
    """Save states 1, 2, …; shared memory has the number that was saved last, and whether a save is going on."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{shared}.store", size), rank=rank, world_size=size)
    with open(shared, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 16)
    number, writer = 0, BackgroundWriter() if background else None
    while True:
        number += 1
        values = torch.full((600, 500), float(number))
        tensors = {f"t{i}": share(rank, size, values) for i in range(3)}
        memory[8 + rank] = 1
        at = {"number": number}
        save(folder, 1 if same_step else number, tensors, at, at, keep_last=2, background=writer)
        values.zero_()  # what is written is a copy
        if writer is not None:
            writer.wait()
            if size > 1:
                dist.barrier()
        memory[8 + rank] = 0
        if rank == 0:
            memory[:4] = struct.pack("<I", number)


def kill_once(folder: Path, ranks: int, same_step: bool, draw: random.Random, background: bool) -> bool:
    """Kill a job at a random moment, and look at its newest checkpoint; True if that was within a save."""
    folder.mkdir()
    shared = folder.with_suffix(".shared")
    shared.write_bytes(bytes(16))
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(list(IMPORTED))
    arguments = [(rank, ranks, str(folder), str(shared), same_step, background) for rank in range(ranks)]
    jobs = [fork.Process(target=saving, args=given, daemon=True) for given in arguments]
    for job in jobs:
        job.start()
    with open(shared, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 16)
    deadline = time.monotonic() + 60
    ends = [job.sentinel for job in jobs]
    while struct.unpack("<I", memory[:4])[0] < 2:
        assert not wait(ends, 0.002), "a rank has ended"
        assert time.monotonic() < deadline, "the job saves nothing"
    assert not wait(ends, draw.random() * 0.03)
    inside = any(memory[8 : 8 + ranks])
    for job in jobs:
        assert job.pid is not None
        os.kill(job.pid, signal.SIGKILL)
    for job in jobs:
        job.join()
    saved = struct.unpack("<I", memory[:4])[0]
    with Checkpoint.open(folder) as checkpoint:
        found = {value.item() for name in checkpoint.names for value in checkpoint.read(name).unique()}
        found |= {checkpoint.plain["number"], *(checkpoint.by_rank(rank)["number"] for rank in range(ranks))}
    assert len(found) == 1
    assert found.pop() in (saved, saved + 1)
    save_state(folder, 10**6, keep_last=1)
    assert sorted(path.name for path in folder.iterdir()) == ["newest", "step-001000000"]
    return inside


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("trials", "least"),
    [(8, 5), pytest.param(40, 30, marks=pytest.mark.slow), pytest.param(200, 150, marks=pytest.mark.nightly)],
)
def test_killed_at_random_moments(tmp_path: Path, trials: int, least: int) -> None:
    draw = random.Random(trials)
    inside = [kill_once(tmp_path / str(i), 1 + i % 2, i % 4 > 1, draw, background=i % 8 > 3) for i in range(trials)]
    assert sum(inside) >= least, "most moments are within a save"
