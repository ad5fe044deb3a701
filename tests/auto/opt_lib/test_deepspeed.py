"""zero1, zero2 and the recipe ds_3d_parallel under DeepSpeed's engines: equal to plain training.

It keeps process groups beyond their life, so every test has its own processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from atorch import auto_accelerate
from atorch.distributed.collectives import gather_objects
from tests.auto.opt_lib import sharing_job
from tests.contract.job import arguments, distance, first_names, make_model, reference, snapshot, updates
from tests.pool import Pool, RankFailure

pytest.importorskip("deepspeed")


@pytest.fixture
def processes() -> Iterator[Pool]:
    """Worker processes of one test."""
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


ZERO1 = ("zero1", {"use_ds_zero": True})


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("method", [ZERO1, ("zero2", {"use_ds_zero": True})], ids=["zero1", "zero2"])
def test_trains_as_one_process_does(processes: Pool, method: Any, clip: bool) -> None:
    assert max(processes.run(launched, sharing_job.deviation, [method], "llama", clip)) <= 1e-4


def accumulated(rank: int, size: int) -> tuple[dict[str, bool], float]:
    """The loop's warnings, and the distance of two accumulated halves of a batch from the whole batch in one pass."""
    weights = []
    for num_passes in (1, 2):
        result = sharing_job.accelerated([ZERO1], "llama")
        for batch in result.dataloader:
            for index, piece in enumerate(batch.chunk(num_passes)):
                result.optim.set_gradient_accumulation_boundary(index == num_passes - 1)
                result.optim.backward(result.loss_func(piece, result.model(piece)) / num_passes)
                result.optim.step()
        weights.append(torch.cat([p.detach().flatten().float() for p in result.model.parameters()]))
    return result.args, float((weights[0] - weights[1]).abs().max())


def test_the_loop_is_told_what_it_needs_and_accumulates_up_to_the_boundary(processes: Pool) -> None:
    expected = {"use_optim_backward": True, "requires_set_gradient_accumulation_boundary": True}
    for told, off in processes.run(launched, accumulated):
        assert told == expected
        assert off <= 1e-6


def piped(*axes: tuple[str, int]) -> Any:
    """The result of the recipe on a mesh."""
    strategy = [("parallel_mode", (list(axes), None)), "ds_3d_parallel"]
    return auto_accelerate(make_model(), load_strategy=strategy, **arguments())[1]


def deviation(rank: int, size: int, *axes: tuple[str, int]) -> tuple[float, float]:
    """How far updates and losses of `result.step` are from plain training's."""
    plain = make_model()
    before, names = snapshot(plain), first_names(plain)
    result = piped(*axes)
    losses = [float(result.step(batch)) for batch in result.dataloader]
    expected, expected_losses = reference()
    after = {names[name]: value for name, value in snapshot(result.model).items()}
    assert set().union(*gather_objects(set(after))) == before.keys()
    update = updates({name: before[name] for name in after}, after)
    loss_error = (torch.tensor(losses) - torch.tensor(expected_losses)).abs().max().item()
    return distance(update, {name: expected[name] for name in update}), loss_error


@pytest.mark.parametrize(
    "axes",
    [
        [("pipeline", 2)],
        pytest.param([("data", 2), ("pipeline", 2)], marks=pytest.mark.nightly),
        pytest.param([("tensor", 2), ("pipeline", 2)], marks=pytest.mark.nightly),
        pytest.param([("tensor", 2), ("data", 2), ("pipeline", 2)], marks=pytest.mark.nightly),
    ],
)
def test_the_recipe_trains_as_one_process_does(processes: Pool, axes: Any) -> None:
    for update, loss in processes.run(launched, deviation, *axes, ranks=2 ** len(axes), timeout=600):
        assert update <= 1e-4
        assert loss <= 1e-5


def misused(rank: int, size: int) -> str:
    result = piped(("pipeline", 2))
    batch = next(iter(result.dataloader))
    with torch.no_grad():
        evaluated = result.model(**batch).logits
    assert evaluated.isfinite().all()
    with pytest.raises(TypeError, match="call result.step") as caught:
        result.loss_func(batch, result.model(**batch))
    return str(caught.value)


def test_the_loop_of_the_recipe_is_told_to_step(processes: Pool) -> None:
    assert all("whole batches" in told for told in processes.run(launched, misused, ranks=2))


def in_the_wrong_order(rank: int, size: int) -> None:
    piped(("pipeline", 2), ("data", 2))


@pytest.mark.nightly
def test_a_mesh_in_another_order_is_refused(processes: Pool) -> None:
    with pytest.raises(RankFailure, match="DeepSpeed arranges its processes as tensor, data, pipeline"):
        processes.run(launched, in_the_wrong_order, ranks=4)
