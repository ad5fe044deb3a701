"""Checkpoints saved again under their tag: a kill at any moment leaves all of the old one, or all of the new one."""

import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import atorch.smp as smp
from atorch.smp.session import session
from tests.pool import Pool, RankFailure
from tests.smp.checkpointing.test_folder import PIPELINE, Optimizer, Stage, begin, resumed

CHANGES = ("os.mkdir", "os.rename", "os.rmdir", "os.remove")
KILLED = 77
MOST_CHANGES = 32
"""More than a process makes in a save."""

Dies = Callable[[int, str], bool]
"""Whether to die before a change of the file system, by its number and by what it makes or removes."""


@contextmanager
def dying(dies: Dies, folder: str) -> Iterator[list[str]]:
    """Inside, this process ends as if it were killed, where `dies` says so; gives the changes so far."""
    seen: list[str] = []
    armed = {True}

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(arguments[1], str) and arguments[1].startswith("x")
        if not armed or not (is_write or event in CHANGES):
            return
        target = str(arguments[1] if event == "os.rename" else arguments[0])
        if os.path.isabs(target) and not os.path.realpath(target).startswith(folder):
            return
        if dies(len(seen), target):
            os._exit(KILLED)
        seen.append(f"{event} {target}")

    sys.addaudithook(look)
    try:
        yield seen
    finally:
        armed.clear()


@contextmanager
def inside(path: str, is_apart: bool) -> Iterator[str]:
    """A folder of checkpoints: one for all processes, or where each is a machine, one of its own by the same name."""
    before = os.getcwd()
    if is_apart:
        own = Path(path, str(torch.distributed.get_rank()))
        own.mkdir(parents=True, exist_ok=True)
        os.chdir(own)
    try:
        yield "checkpoints" if is_apart else path
    finally:
        os.chdir(before)


def save(path: str, model: Stage, optimizer: Optimizer, value: int, is_partial: bool) -> None:
    model.rows = {name: torch.full((2,), float(value)) for name in model.rows}
    smp.save_checkpoint(path, "one", is_partial, model, optimizer, user_content={"step": value})


def saved(
    rank: int, size: int, path: str, value: int, is_partial: bool, is_apart: bool, victim: int, dies: Dies | int
) -> list[str]:
    """Save a checkpoint in which everything is of this value; one process ends at that moment, or none does."""
    model, optimizer = begin(PIPELINE)
    if is_apart:
        session().here = replace(session().here, local_rank=0)
    at = dies if callable(dies) else lambda number, target: number == dies
    with inside(path, is_apart) as folder:
        watched = dying(at, os.path.realpath(path)) if rank == victim else nullcontext([])
        with watched as seen:
            save(folder, model, optimizer, value, is_partial)
    smp.shutdown()
    return seen


def resumed_in(rank: int, size: int, path: str, is_partial: bool, is_apart: bool) -> list[Any]:
    with inside(path, is_apart) as folder:
        ways = ({"tag": "one", "partial": is_partial}, {"partial": is_partial})
        return [resumed(rank, size, folder, PIPELINE, given) for given in ways]


def value_of(pool: Pool, path: Path, is_partial: bool, is_apart: bool) -> float:
    values = set()
    for found in itertools.chain(*pool.run(resumed_in, str(path), is_partial, is_apart)):
        assert not isinstance(found, str), found
        content, (state, _), held = found
        values |= {float(content["step"])}
        values |= {float(each) for row in state.values() if isinstance(row, torch.Tensor) for each in row}
        if is_partial:
            values |= {float(each) / 2 for of in held["state"].values() for each in of["exp_avg"]}
    assert len(values) == 1
    return values.pop()


def survives(
    pool: Pool, base: Path, path: Path, is_partial: bool, is_apart: bool, victim: int, dies: Dies | int
) -> bool:
    shutil.copytree(base, path)
    ways = (is_partial, is_apart)
    try:
        pool.run(saved, str(path), 2, *ways, victim, dies)
        return False
    except RankFailure as failure:
        told = str(failure)
    assert f"exit code {KILLED}" in told
    assert value_of(pool, path, *ways) in (1, 2)
    pool.run(saved, str(path), 3, *ways, -1, 0)
    assert value_of(pool, path, *ways) == 3
    folders = [path / each / "checkpoints" for each in "01"] if is_apart else [path]
    assert not [name for folder in folders for name in os.listdir(folder) if name.startswith(".one_")]
    return True


def to_whole(number: int, target: str) -> bool:
    return target.rpartition(".")[0].endswith(("one_partial", "one_full"))


def to_its_place(number: int, target: str) -> bool:
    return target.endswith(("/one_partial", "checkpoints/one")) and "one_partial." not in target


@pytest.mark.parametrize("dies", [to_whole, to_its_place])
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(pool: Pool, tmp_path: Path, dies: Dies) -> None:
    pool.run(saved, str(tmp_path / "base"), 1, True, True, -1, 0)
    assert survives(pool, tmp_path / "base", tmp_path / "killed", True, True, 1, dies)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("is_partial", [False, True], ids=["full", "partial"])
def test_at_every_change_of_the_file_system(
    pool: Pool, tmp_path: Path, is_partial: bool, is_apart: bool, victim: int
) -> None:
    if is_apart and not is_partial:
        pytest.skip("a full checkpoint is one process's, and is read where it can be seen")
    pool.run(saved, str(tmp_path / "base"), 1, is_partial, is_apart, -1, 0)
    num_kills = 0
    for point in range(MOST_CHANGES):  # which process of those that share a folder makes most of them is chance
        path = tmp_path / f"killed{point}"
        num_kills += survives(pool, tmp_path / "base", path, is_partial, is_apart, victim, point)
        shutil.rmtree(path)
    assert num_kills >= (20 if is_apart else 1)
    assert num_kills < MOST_CHANGES
