"""torchrun restarts a job whose processes die, and it goes on bit for bit."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.auto.restarting_job import train
from tests.house.source import ROOT
from tests.pool import Pool


def torchrun(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
    return subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=timeout, env=environment)


def rendezvous(kind: str) -> list[str]:
    """Options of torchrun for one machine."""
    if kind == "c10d":
        return ["--standalone"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return ["--master-port", str(free.getsockname()[1])]


def check(pool: Pool, tmp_path: Path, failure: str, kind: str, num: int) -> None:
    """Fail after each start, `num` times: every restart works, and every loss is the uninterrupted run's."""
    (tmp_path / "whole").mkdir()
    until = num + 2
    expected = pool.run(train, str(tmp_path / "whole"), until)
    job = [str(ROOT / "tests/auto/restarting_job.py"), str(tmp_path), str(until), failure, str(num)]
    done = torchrun(*rendezvous(kind), "--max-restarts", str(num), *job, timeout=60 + 60 * num)
    assert done.returncode == 0, done.stderr
    for rank, losses in enumerate(expected):
        lines = (tmp_path / f"losses-{rank}").read_text().split("\n")[:-1]
        assert set(lines) == {f"{step + 1} {loss}" for step, loss in enumerate(losses)}
        assert len(lines) == until + num  # a step of each life that failed was taken again


def test_a_restart(pool: Pool, tmp_path: Path) -> None:
    check(pool, tmp_path, "kill", "c10d", 1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["c10d", "static"])
@pytest.mark.parametrize("failure", ["kill", "raise"])
def test_many_restarts(pool: Pool, tmp_path: Path, failure: str, kind: str, num: int) -> None:
    check(pool, tmp_path, failure, kind, num)
