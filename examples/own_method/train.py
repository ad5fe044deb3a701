"""A method from outside the package: `ema` of the package beside this file, used by name like any other.

pip install examples/own_method
python examples/own_method/train.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import atorch


def loss_func(batch: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of `output` (batch, 10) to the batch's labels."""
    return nn.functional.cross_entropy(output, batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, data: Any) -> float:
    """The share of samples with a correct label."""
    images, labels = data[:]
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train with large, noisy steps, and compare the last weights with the averaged ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images, labels = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    training, held_out = TensorDataset(images[:1200], labels[:1200]), TensorDataset(images[1200:], labels[1200:])

    atorch.load_methods("ema")  # imports the package and registers its method
    _, result, strategy = atorch.auto_accelerate(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        torch.optim.SGD,
        training,
        loss_func,
        optim_args={"lr": 0.4},
        dataloader_args={"batch_size": 4, "shuffle": True, "drop_last": True},
        load_strategy=["parallel_mode", ("ema", {"decay": 0.99})],
    )
    print(f"Strategy: {strategy}")

    for epoch in range(args.epochs):
        result.dataloader.set_epoch(epoch)
        for batch in result.dataloader:
            loss = result.loss_func(batch, result.model(batch[0]))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
    last = accuracy(result.model, held_out)
    with result.model.average.used():
        averaged = accuracy(result.model, held_out)
    print(f"held-out accuracy: {last:.1%} with the last weights, {averaged:.1%} with the averaged ones")


if __name__ == "__main__":
    main()
