"""`smp.init`: one arrangement of the processes, for a whole script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch.smp as smp
from atorch.errors import ArgumentError
from atorch.smp.config import Config
from atorch.smp.session import AXES_OF, session, slices
from tests.pool import Pool
from tests.smp.job import several


@pytest.fixture
def ended() -> Iterator[None]:
    """Whatever a test begins is ended."""
    yield
    if smp.is_initialized():
        smp.shutdown()


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
    two = {"partitions": 2}
    ways = ([two, two], [two, {**two, "microbatches": 2}], [two, {**two, "microbatch": 2}])
    (alike, first, waiting), (other, second, faulty) = pool.run(several, [(begin, list(way)) for way in ways])
    assert alike == other == "(('tensor', 1), ('pipeline', 2), ('data', 1))"
    assert first == second
    assert "config['microbatches'] is 1 on rank 0 and 2 on rank 1" in first
    assert "rank 1 failed: config: there is no key 'microbatch'" in waiting
    assert "there is no key 'microbatch'" in faulty
