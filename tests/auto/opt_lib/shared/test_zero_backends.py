"""zero1 and zero2 under DeepSpeed. It keeps process groups beyond their life, so every test has its own processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.auto.opt_lib.sharing_job import accelerated, deviation
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
        return function(rank, size, *args)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("method", ["zero1", "zero2"])
def test_trains_as_one_process_does(processes: Pool, method: str, clip: bool) -> None:
    strategy = [(method, {"use_ds_zero": True})]
    assert max(processes.run(launched, deviation, strategy, "llama", clip)) <= 1e-4


def arguments(rank: int, size: int) -> dict[str, bool]:
    args: dict[str, bool] = accelerated([("zero1", {"use_ds_zero": True})], "llama").args
    return args


def test_args_tell_the_loop_what_it_needs(processes: Pool) -> None:
    expected = {"use_optim_backward": True, "requires_set_gradient_accumulation_boundary": True}
    assert processes.run(launched, arguments) == [expected] * 2


def accumulated(rank: int, size: int) -> float:
    """How far two halves of a batch, accumulated, are from the whole batch in one pass."""
    weights = []
    for num_passes in (1, 2):
        result = accelerated([("zero1", {"use_ds_zero": True})], "llama")
        for batch in result.dataloader:
            for index, piece in enumerate(batch.chunk(num_passes)):
                result.optim.set_gradient_accumulation_boundary(index == num_passes - 1)
                result.optim.backward(result.loss_func(piece, result.model(piece)) / num_passes)
                result.optim.step()
        weights.append(torch.cat([p.detach().flatten().float() for p in result.model.parameters()]))
    return float((weights[0] - weights[1]).abs().max())


def test_accumulates_up_to_the_boundary(processes: Pool) -> None:
    assert max(processes.run(launched, accumulated)) <= 1e-6


def beside(rank: int, size: int, strategy: list[Any]) -> None:
    accelerated([*strategy, ("zero1", {"use_ds_zero": True})], "llama")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (["half"], "keeps the fp32 weights itself"),
        (["amp_native"], "keeps the fp32 weights itself"),
        ([("amp_native", {"dtype": "bf16", "skip_if_nonfinite": True})], "must have the optimizer itself"),
        ([("parallel_mode", ([("tensor", 2)], None))], "shares over all 2 processes"),
    ],
)
def test_what_it_would_get_wrong_is_refused(processes: Pool, strategy: list[Any], message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        processes.run(launched, beside, strategy)
