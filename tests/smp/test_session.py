"""`smp.init`: one arrangement of the processes, for a whole script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.config import Config
from atorch.smp.session import AXES_OF, session, slices
from tests.pool import Pool


@pytest.fixture
def ended() -> Iterator[None]:
    """Whatever a test begins is ended."""
    yield
    if smp.is_initialized():
        smp.shutdown()


@pytest.mark.parametrize(
    ("given", "num_ranks", "expected"),
    [
        ({"partitions": 2}, 8, (("tensor", 1), ("pipeline", 2), ("data", 4))),
        ({"partitions": 2, "placement_strategy": "spread"}, 8, (("data", 4), ("pipeline", 2), ("tensor", 1))),
        (
            {"partitions": 2, "tensor_parallel_degree": 2, "placement_strategy": "PDT"},
            8,
            (("tensor", 2), ("data", 2), ("pipeline", 2)),
        ),
        (
            {"sharded_data_parallel_degree": 2, "partitions": 2},
            8,
            (("tensor", 1), ("pipeline", 2), ("zero", 2), ("data", 2)),
        ),
    ],
)
def test_placement_orders_the_axes(given: dict[str, Any], num_ranks: int, expected: Any) -> None:
    assert slices(Config.read({"ddp": True, **given}), num_ranks) == expected


@pytest.mark.parametrize(
    ("given", "num_ranks", "told"),
    [
        ({"partitions": 3, "ddp": True}, 8, "= 3 processes hold a model, but there are 8; start a multiple of 3"),
        ({"partitions": 4, "tensor_parallel_degree": 4, "ddp": True}, 8, "= 16 processes hold a model"),
        ({"sharded_data_parallel_degree": 3, "ddp": True}, 8, "choose a degree that divides 8"),
        ({"partitions": 2}, 8, "ddp is False, but 8 processes with pipeline_parallel_degree 2"),
    ],
)
def test_sizes_that_do_not_divide_are_told(given: dict[str, Any], num_ranks: int, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        slices(Config.read(given), num_ranks)
    assert told in str(error.value)


@pytest.mark.usefixtures("ended")
def test_one_process_without_a_launcher() -> None:
    assert not smp.is_initialized()
    with pytest.raises(ArgumentError, match=r"call it before everything else of smp"):
        session()
    smp.init()
    assert smp.is_initialized()
    assert session().config == Config.read({})
    assert session().model is None
    assert session().optimizer is None
    assert session().device == torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert all(dist.get_world_size(session().mesh.group(*axes)) == 1 for axes in AXES_OF.values())
    with pytest.raises(ArgumentError, match="smp.init has been called before"):
        smp.init()
    smp.shutdown()
    assert not smp.is_initialized()
    smp.init({"microbatches": 2})
    assert session().config.microbatches == 2


@pytest.mark.usefixtures("ended")
def test_a_fault_leaves_nothing_begun() -> None:
    with pytest.raises(ArgumentError, match="start a multiple of 2"):
        smp.init({"partitions": 2})
    assert not smp.is_initialized()


def begin(rank: int, size: int, given: list[dict[str, Any]]) -> str:
    """What `init` with this rank's configuration raised, or the axes."""
    try:
        smp.init(given[rank])
    except ArgumentError as error:
        return str(error)
    axes = str(session().mesh.slices)
    smp.shutdown()
    return axes


def test_ranks_begin_together_or_not_at_all(pool: Pool) -> None:
    assert pool.run(begin, [{"partitions": 2}] * 2) == ["(('tensor', 1), ('pipeline', 2), ('data', 1))"] * 2
    told = pool.run(begin, [{"partitions": 2}, {"partitions": 2, "microbatches": 2}])
    assert len(set(told)) == 1
    assert "config['microbatches'] is 1 on rank 0 and 2 on rank 1" in told[0]
    told = pool.run(begin, [{"partitions": 2}, {"partitions": 2, "microbatch": 2}])
    assert "rank 1 failed: config: there is no key 'microbatch'" in told[0]
    assert "there is no key 'microbatch'" in told[1]


SCRIPT = """
import sys
import atorch.smp as smp
from atorch.smp.session import session
smp.init()
smp.shutdown()
smp.init({"partitions": 1, "ddp": True})
sys.stdout.write(f"{session().mesh.rank('data')} {session().mesh.slices}\\n")  # in one piece: two processes write
"""


def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "script.py")]
    environment = {
        **os.environ,
        "SMP_CONFIG": '{"partitions": 2, "horovod": false}',
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{i} (('tensor', 1), ('pipeline', 1), ('data', 2))" for i in range(2)]
    assert done.stderr.count("these keys have no effect here: horovod") == 1  # rank 0's
