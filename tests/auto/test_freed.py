"""What a strategy made is freed with the model; a search that tries many would else keep all, with their groups."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from atorch import auto_accelerate
from tests.auto.training import run_each
from tests.pool import Pool


class Net(nn.Module):
    """Two layers, and a scalar that no method splits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.factor = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, expected: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x) * self.factor, expected)


def trained(strategy: list[Any]) -> weakref.ref[nn.Module]:
    """A module of a model that was trained for some steps."""
    model = Net()
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        TensorDataset(*torch.randn(2, 16, 8)),
        lambda batch, loss: loss,
        model_input_format="unpack_sequence",
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 4},
        load_strategy=strategy,
    )
    assert result is not None
    for batch in result.dataloader:
        result.step(batch)
    return weakref.ref(model.layers)


def is_freed(rank: int, size: int, strategy: list[Any]) -> bool:
    held = trained(strategy)
    gc.collect()
    return held() is None


def test_a_model_is_freed(pool: Pool) -> None:
    strategies: list[list[Any]] = [[name] for name in ("ddp", "zero1", "zero2", "fsdp", "chunk")]
    strategies.append(["ddp", ("micro_batch", {"size": 1}), ("offload", {"optimizer": 1.0})])
    found = run_each(pool, is_freed, [(strategy,) for strategy in strategies])
    assert not [strategy for strategy, by_rank in zip(strategies, found, strict=True) if not all(by_rank)]
