"""Processes that compute one batch together are told where they were given different ones."""

import copy
import math
import pickle
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.runtime.data.batches import LOOKS, watch_batches
from tests.auto.opt_lib.sharing_job import TOKENS, accelerated
from tests.pool import Pool, on_ranks

PIPELINE = ("pipeline_parallel", {"micro_batches": 2})


class Takes(nn.Module):
    """Anything, in nested arguments."""

    def forward(self, given: Any, *, mask: Tensor | None = None) -> Tensor:
        return torch.ones(1)


def told(rank: int, size: int, kind: str, first: int) -> str:
    """What is said where rank 1 is given something else from the pass `first` on."""
    model, other = Takes(), rank if kind else 0
    watch_batches(model, {"tensor": dist.group.WORLD} if size > 1 else {})
    with mock.patch.object(logger, "warning") as warning:
        for number in range(LOOKS + 2):
            differs = other if number >= first else 0
            rows = torch.arange(2 * (3 + (differs if kind == "shape" else 0)))
            given = {"ids": [rows + (differs if kind == "tokens" else 0), "text"]}
            mask = torch.ones(2, 2) + (1e-6 * differs if kind == "floats" else 0)
            try:
                model(given, mask=mask)
            except ArgumentError as error:
                return f"raised: {error}"
            with torch.no_grad():
                model(torch.full((2,), rank))  # an evaluation, which may be of each process's own
    return "warned: " + warning.call_args.args[0] % warning.call_args.args[1:] if warning.called else ""


CASES = [
    ("", 0, ""),
    ("tokens", 0, "raised: processes along tensor compute one batch together"),
    ("tokens", 1, "raised: "),
    ("shape", 0, "raised: "),
    ("floats", 0, "warned: processes along tensor"),
    ("tokens", LOOKS, ""),  # looked at no more
]


@on_ranks()
def test_different_batches_are_told_on_all_processes(rank: int, size: int) -> None:
    model = Takes()
    watch_batches(model, {"tensor": dist.group.WORLD})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        twin(torch.full((2,), rank))  # copies may be given anything
    said = [told(rank, size, kind, first) for kind, first, _ in CASES]
    assert all(text.startswith(expected) for text, (*_, expected) in zip(said, CASES, strict=True)), said
    assert [bool(text) for text in said] == [bool(expected) for *_, expected in CASES]


@pytest.mark.parametrize(
    ("axes", "methods", "says"),
    [
        ([("sequence", 2)], ["sequence_parallel"], "along sequence compute"),
        ([("pipeline", 2)], [PIPELINE], "along pipeline compute"),
        pytest.param(
            [("tensor", 2), ("pipeline", 2)],
            ["tensor_parallel", PIPELINE],
            "along tensor × pipeline compute",
            marks=pytest.mark.slow,
        ),
        ([("data", 2)], ["ddp"], ""),
        ([("zero", 2)], ["fsdp"], ""),
    ],
    ids=str,
)
def test_a_loop_that_deals_samples_out_by_rank_is_told(pool: Pool, axes: Any, methods: list[Any], says: str) -> None:
    ranks = math.prod(degree for _, degree in axes)
    pool.run(deal_by_rank, [("parallel_mode", (axes, None)), *methods], says, ranks=ranks)


def deal_by_rank(rank: int, size: int, strategy: Any, says: str) -> None:
    result = accelerated(strategy, "llama")
    tokens = TOKENS[rank::size][:2]
    with pytest.raises(ArgumentError, match=says) if says else nullcontext():
        result.loss_func(tokens, result.model(tokens)).backward()
