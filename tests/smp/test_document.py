"""The document's examples of steps and files; what they leave open (`MyModel`, a folder, the batch) is filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from tests.pool import Pool
from tests.smp.job import begun, several

WIDTH = 6


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def loss_of(predictions: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(predictions, targets)


@smp.step
def train_step(model: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    predictions = model(inputs)  # model is a smp.DistributedModel object
    loss = loss_of(predictions, targets)
    model.backward(loss)  # loss is a tensor with only one element as its data
    return predictions, loss


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    """The losses of plain training."""
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        inputs, targets = batch_of(number)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def with_steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        predictions, loss = train_step(model, *batch_of(number))
        assert predictions.concat().shape == (8, WIDTH)
        optimizer.step()
        losses.append(float(loss.reduce_mean()))
    return losses


def save(folder: str, partial: bool, model: Any, optimizer: Any) -> None:
    # To save, always save on dp_rank 0 to avoid data racing
    if smp.dp_rank() == 0:
        model_dict = model.local_state_dict() if partial else model.state_dict()
        opt_dict = optimizer.local_state_dict() if partial else optimizer.state_dict()
        held = {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict}
        # Of a partial model the library will create `checkpoint.pt_{mprank}` for each mp rank
        smp.save(held, f"{folder}/checkpoint.pt", partial=partial)


def load(folder: str, partial: bool, model: Any, optimizer: Any) -> None:
    # To load, load on all ranks.
    # The only difference for partial/full loading is the partial flag in smp.load
    checkpoint = smp.load(f"{folder}/checkpoint.pt", partial=partial)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])


def wrapped(whole: nn.Module, lr: float) -> tuple[Any, Any]:
    model = smp.DistributedModel(whole)
    return model, smp.DistributedOptimizer(adam(model, lr))


def trained_and_saved(rank: int, size: int, folder: str) -> list[float]:
    """The losses of two steps, after which both kinds of checkpoint are saved."""
    with begun({"partitions": 2, "microbatches": 2, "ddp": size > 2}):
        model, optimizer = wrapped(MyModel(), lr=0.01)
        losses = with_steps(model, optimizer, range(2))
        for partial in (True, False):
            save(folder, partial, model, optimizer)
        smp.barrier()
    return losses


def loaded(rank: int, size: int, folder: str, partial: bool, before: bool) -> list[float]:
    """The losses of two steps behind a load, before the first step or behind another one."""
    with begun({"partitions": 2, "microbatches": 2, "ddp": size > 2}):
        whole = MyModel()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.zero_()
        model, optimizer = wrapped(whole, lr=0.5)
        if not before:
            with_steps(model, optimizer, range(7, 8))
        load(folder, partial, model, optimizer)
        return with_steps(model, optimizer, range(2, 4))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_checkpoints_go_on_in_parallel_and_in_plain_training(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Partial ones, and full ones, also those that plain training has written."""
    model = MyModel()
    optimizer = adam(model)
    right = plainly(model, optimizer, range(2))
    held = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    (tmp_path / "plain").mkdir()
    torch.save(held, tmp_path / "plain" / "checkpoint.pt")
    rest = plainly(model, optimizer, range(2, 4))

    folder = tmp_path / "smp"
    folder.mkdir()
    ways = [(str(folder), True, True), (str(folder), False, False), (str(tmp_path / "plain"), False, True)]
    calls = [(trained_and_saved, str(folder)), *((loaded, *way) for way in ways)]
    for first, *others in pool.run(several, calls, ranks=ranks):
        assert first == pytest.approx(right, rel=1e-4)
        assert all(losses == pytest.approx(rest, rel=1e-4) for losses in others), others
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "checkpoint.pt_0", "checkpoint.pt_1"]

    checkpoint = torch.load(folder / "checkpoint.pt")
    model = MyModel()
    optimizer = adam(model, lr=0.5)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    assert plainly(model, optimizer, range(2, 4)) == pytest.approx(rest, rel=1e-4)
