"""A stage that raises ends the pass at once, wherever it raises."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from atorch.auto import auto_accelerate
from tests.pool import Pool, RankFailure

PIPELINE = [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": 2})]


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("this backward breaks")


class Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(8, 8), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return _Breaks.apply(x) if self.breaks and torch.distributed.get_rank() == 1 else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(place == 3) for place in range(4)))

    def forward(self, batch: list[Tensor]) -> Any:
        return self.blocks(batch[0])


def train(rank: int, size: int) -> None:
    data = TensorDataset(torch.randn(8, 8), torch.randn(8, 8))
    _, result, _ = auto_accelerate(
        Net(),
        torch.optim.SGD,
        data,
        lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 4},
        load_strategy=PIPELINE,
    )
    for batch in result.dataloader:
        result.loss_func(batch, result.model(batch)).backward()


def test_what_backward_raises_keeps_nobody_waiting(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match="this backward breaks"):
        pool.run(train)
    assert time.monotonic() - began < 100  # a process that waits is given up after 120 s
