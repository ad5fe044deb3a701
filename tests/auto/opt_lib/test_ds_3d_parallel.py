"""The recipe, and what it stands for under DeepSpeed's engine: whole batches, equal to plain training."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atorch import auto_accelerate
from atorch.auto.strategy import Strategy
from atorch.distributed.collectives import gather_objects
from tests.contract.job import arguments, distance, first_names, make_model, reference, snapshot, updates
from tests.pool import Pool, RankFailure

MESH = ("parallel_mode", ([("tensor", 2), ("data", 2), ("pipeline", 2)], None))


def test_stands_for_three_methods():
    strategy = Strategy.of([MESH, ("ds_3d_parallel", {"ds_config": {"wall_clock_breakdown": False}})])
    assert strategy.names() == ("parallel_mode", "tensor_parallel", "pipeline_parallel", "zero1")
    assert "deepspeed" in str(strategy)
    without = Strategy.of([("parallel_mode", ([("data", 2), ("pipeline", 2)], None)), "ds_3d_parallel"])
    assert without.names() == ("parallel_mode", "pipeline_parallel", "zero1")


@pytest.fixture
def processes() -> Iterator[Pool]:
    """Worker processes of one test: DeepSpeed keeps process groups beyond their life."""
    pytest.importorskip("deepspeed")
    processes = Pool()
    yield processes
    processes.close()


def launched(rank: int, size: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function(rank, size, *args)` in a process that knows its place as under torchrun, on which DeepSpeed insists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(rank))
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("TORCH_EXTENSIONS_DIR", os.path.join(tempfile.gettempdir(), "torch_extensions"))
        return function(rank, size, *args)


def deviation(rank: int, size: int, slices: Any) -> tuple[float, float]:
    """How far updates and losses of `result.step` are from plain training's."""
    model = make_model()
    before, names = snapshot(model), first_names(model)
    strategy = [("parallel_mode", (slices, None)), "ds_3d_parallel"]
    _, result, _ = auto_accelerate(model, load_strategy=strategy, **arguments())
    losses = [float(result.step(batch)) for batch in result.dataloader]
    expected, expected_losses = reference()
    after = {names[name]: value for name, value in snapshot(result.model).items()}
    assert set().union(*gather_objects(set(after))) == before.keys()
    update = updates({name: before[name] for name in after}, after)
    loss_error = (torch.tensor(losses) - torch.tensor(expected_losses)).abs().max().item()
    return distance(update, {name: expected[name] for name in update}), loss_error


@pytest.mark.parametrize(
    "slices",
    [
        [("pipeline", 2)],
        pytest.param([("data", 2), ("pipeline", 2)], marks=pytest.mark.nightly),
        pytest.param([("tensor", 2), ("pipeline", 2)], marks=pytest.mark.nightly),
        pytest.param([("tensor", 2), ("data", 2), ("pipeline", 2)], marks=pytest.mark.nightly),
    ],
)
def test_trains_as_one_process_does(processes: Pool, slices: Any) -> None:
    ranks = 2 ** len(slices)
    for update, loss in processes.run(launched, deviation, slices, ranks=ranks, timeout=600):
        assert update <= 1e-4
        assert loss <= 1e-5


def misused(rank: int, size: int) -> str:
    strategy = [("parallel_mode", ([("pipeline", 2)], None)), "ds_3d_parallel"]
    _, result, _ = auto_accelerate(make_model(), load_strategy=strategy, **arguments())
    batch = next(iter(result.dataloader))
    with torch.no_grad():
        evaluated = result.model(**batch).logits
    assert evaluated.isfinite().all()
    with pytest.raises(TypeError, match="call result.step") as caught:
        result.loss_func(batch, result.model(**batch))
    return str(caught.value)


def test_the_loop_is_told_to_step(processes: Pool) -> None:
    assert all("whole batches" in told for told in processes.run(launched, misused, ranks=2))


def in_the_wrong_order(rank: int, size: int) -> None:
    strategy = [("parallel_mode", ([("pipeline", 2), ("data", 2)], None)), "ds_3d_parallel"]
    auto_accelerate(make_model(), load_strategy=strategy, **arguments())


@pytest.mark.nightly
def test_refuses_a_mesh_in_another_order(processes: Pool) -> None:
    with pytest.raises(RankFailure, match="DeepSpeed arranges its processes as tensor, data, pipeline"):
        processes.run(launched, in_the_wrong_order, ranks=4)
