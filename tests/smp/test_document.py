"""The document's own examples, as they stand: what they leave open (`MyModel`, a folder, the batch) is filled in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from tests.pool import Pool
from tests.smp.job import begun

WIDTH = 6


class Child0(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Child1(Child0):
    pass


class Child2(Child0):
    pass


class Child3(Child0):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()  # which the document's own listing forgets
        with smp.partition(1):
            self.child0 = Child0()  # child0 on partition 1
            with smp.partition(2):
                self.child1 = Child1()  # child1 on partition 2
            self.child2 = Child2()  # child2 on partition 1
        self.child3 = Child3()  # child3 on default_partition

    def forward(self, x: Tensor) -> Tensor:
        for child in (self.child0, self.child1, self.child2, self.child3):
            x = torch.tanh(child(x))
        return x


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(Child0() for _ in range(4)))

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


@smp.step
def train_step_with_gradients(model: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(inputs)
    out_grads = 2 * (outputs.detach() - targets) / outputs.numel()
    model.backward(outputs, out_grads)
    return outputs, loss_of(outputs, targets)


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


def plain_losses(number: int = 4) -> list[float]:
    model = MyModel()
    return plainly(model, adam(model), range(number))


def with_steps(model: Any, optimizer: Any, numbers: range, step: Any = train_step) -> list[float]:
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        predictions, loss = step(model, *batch_of(number))
        assert predictions.concat().shape == (8, WIDTH)
        optimizer.step()
        losses.append(float(loss.reduce_mean()))
    return losses


def trained(rank: int, size: int, how: str) -> tuple[list[float], dict[str, Tensor]]:
    with begun({"partitions": 2, "microbatches": 2, "ddp": size > 2}):
        model = smp.DistributedModel(MyModel())
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        step = train_step if how == "loss" else train_step_with_gradients
        return with_steps(model, optimizer, range(3), step), model.state_dict()


@pytest.mark.parametrize(("how", "ranks"), [("loss", 4), ("gradients", 2)])
def test_the_training_step_is_plain_training(pool: Pool, how: str, ranks: int) -> None:
    plain = MyModel()
    right = plainly(plain, adam(plain), range(3))
    for losses, state in pool.run(trained, how, ranks=ranks):
        assert losses == pytest.approx(right, rel=1e-4)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def nested(rank: int, size: int, auto: bool) -> tuple[Mapping[str, int], list[str], float]:
    with begun({"partitions": 3, "microbatches": 2, "auto_partition": auto, "default_partition": 0}):
        torch.manual_seed(0)
        model = smp.DistributedModel(Model())
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        losses = with_steps(model, optimizer, range(2))
        assert model.division is not None
        return dict(model.division.partition_of), [name for name, _ in model.local_named_parameters()], losses[-1]


def test_nested_partitions_are_where_the_comments_say(pool: Pool) -> None:
    with pytest.MonkeyPatch.context() as patch:  # whole, without a session
        patch.setattr(smp, "partition", lambda index: nullcontext())
        torch.manual_seed(0)
        model = Model()
        right = plainly(model, adam(model), range(2))
    results = pool.run(nested, False, ranks=3)
    places = {"child0": 1, "child1": 2, "child2": 1, "child3": 0}
    for rank, (found, held, loss) in enumerate(results):
        assert found == places
        here = {name.partition(".")[0] for name in held}
        assert here == {name for name, place in places.items() if place == rank}
        assert loss == pytest.approx(right[-1], rel=1e-4)


def test_partitions_by_hand_are_ignored_where_they_are_made_automatically(pool: Pool) -> None:
    for found, _, _ in pool.run(nested, True, ranks=3):
        assert sorted(set(found.values())) == [0, 1, 2]
        assert list(found.values()) == sorted(found.values()), "stages follow the order of execution"


def save(folder: str, partial: bool, model: Any, optimizer: Any) -> None:
    save_partial_model, save_full_model = partial, not partial
    # To save, always save on dp_rank 0 to avoid data racing
    if partial:  # noqa: SIM102
        # To save the partial model on each mp rank
        # the library will create `checkpoint.pt_{mprank}` for each mp rank
        if save_partial_model:  # noqa: SIM102
            if smp.dp_rank() == 0:
                model_dict = model.local_state_dict()  # save the partial model
                opt_dict = optimizer.local_state_dict()  # save the partial optimizer state
                smp.save(
                    {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
                    f"{folder}/checkpoint.pt",
                    partial=True,
                )
    # To save the full model
    if save_full_model:  # noqa: SIM102
        if smp.dp_rank() == 0:
            model_dict = model.state_dict()  # save the full model
            opt_dict = optimizer.state_dict()  # save the full optimizer state
            smp.save(
                {"model_state_dict": model_dict, "optimizer_state_dict": opt_dict},
                f"{folder}/checkpoint.pt",
                partial=False,
            )


def load(folder: str, partial: bool, model: Any, optimizer: Any) -> None:
    partial_checkpoint, full_checkpoint = partial, not partial
    # To load, load on all ranks.
    # The only difference for partial/full loading is the partial flag in smp.load
    # Load partial checkpoint
    if partial_checkpoint:
        checkpoint = smp.load(f"{folder}/checkpoint.pt", partial=True)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    # Load full checkpoint
    if full_checkpoint:
        checkpoint = smp.load(f"{folder}/checkpoint.pt", partial=False)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])


def saved_and_loaded(rank: int, size: int, folder: str, partial: bool, before: bool) -> list[float]:
    """The losses of two steps, and of two more after a load into a new model."""
    config = {"partitions": 2, "microbatches": 2, "ddp": size > 2}
    with begun(config):
        # Original model and optimizer
        model = MyModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        # model parallel wrapper
        model = smp.DistributedModel(model)
        optimizer = smp.DistributedOptimizer(optimizer)
        losses = with_steps(model, optimizer, range(2))
        save(folder, partial, model, optimizer)
        smp.barrier()
    with begun(config):
        model = MyModel()
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        model = smp.DistributedModel(model)
        optimizer = smp.DistributedOptimizer(optimizer)
        if not before:
            with_steps(model, optimizer, range(7, 8))
        load(folder, partial, model, optimizer)
        return losses + with_steps(model, optimizer, range(2, 4))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("partial", "before"), [(True, True), (False, False)], ids=["early", "late"])
def test_training_goes_on_from_what_was_saved(
    pool: Pool, tmp_path: Path, partial: bool, before: bool, ranks: int
) -> None:
    right = plain_losses()
    for losses in pool.run(saved_and_loaded, str(tmp_path), partial, before, ranks=ranks):
        assert losses == pytest.approx(right, rel=1e-4)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == (["checkpoint.pt_0", "checkpoint.pt_1"] if partial else ["checkpoint.pt"])


def loaded_from_torch(rank: int, size: int, folder: str) -> list[float]:
    with begun({"partitions": 2, "microbatches": 2}):
        model = MyModel()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        model, optimizer = smp.DistributedModel(model), smp.DistributedOptimizer(optimizer)
        load(folder, False, model, optimizer)
        return with_steps(model, optimizer, range(2, 4))


def test_a_full_checkpoint_of_plain_training_goes_on_in_parallel(pool: Pool, tmp_path: Path) -> None:
    model = MyModel()
    optimizer = adam(model)
    plainly(model, optimizer, range(2))
    held = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save(held, tmp_path / "checkpoint.pt")
    for losses in pool.run(loaded_from_torch, str(tmp_path)):
        assert losses == pytest.approx(plain_losses()[2:], rel=1e-4)


def carried_on_plainly(rank: int, size: int, folder: str) -> None:
    with begun({"partitions": 2, "microbatches": 2}):
        model = smp.DistributedModel(MyModel())
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        with_steps(model, optimizer, range(2))
        save(folder, False, model, optimizer)


def test_a_full_checkpoint_goes_on_in_plain_training(pool: Pool, tmp_path: Path) -> None:
    pool.run(carried_on_plainly, str(tmp_path))
    checkpoint = torch.load(tmp_path / "checkpoint.pt")
    model = MyModel()
    optimizer = adam(model, lr=0.5)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    assert plainly(model, optimizer, range(2, 4)) == pytest.approx(plain_losses()[2:], rel=1e-4)
