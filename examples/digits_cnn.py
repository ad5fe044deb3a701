"""Classify scikit-learn's handwritten digits with a small convolutional network, fully automatic.

python examples/digits_cnn.py
torchrun --nproc-per-node 2 examples/digits_cnn.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from console import console_of
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from atorch import auto_accelerate
from atorch.distributed import init

Sample = dict[str, torch.Tensor]


class Digits(Dataset[Sample]):
    """Scans of digits: `image` (1, 8, 8) between 0 and 1, and `label`, 0 to 9. Every fifth is held out."""

    def __init__(self, *, held_out: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        chosen = [index for index in range(len(labels)) if (index % 5 == 0) == held_out]
        self.images = torch.tensor(images[chosen] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = torch.tensor(labels[chosen])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Sample:
        return {"image": self.images[index], "label": self.labels[index]}


class Cnn(nn.Module):
    """Two convolutions with batch norm, then a linear layer: a batch to logits (batch, 10)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, batch: Sample) -> torch.Tensor:
        """The logits of the batch's images."""
        return self.layers(batch["image"])


def loss_func(batch: Sample, output: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of `output` (batch, 10) to the batch's labels."""
    return nn.functional.cross_entropy(output.float(), batch["label"])


@torch.no_grad()
def accuracy(result: Any, data: Digits, device: torch.device) -> float:
    """The share of samples with a correct label."""
    result.model.eval()
    batch = result.prepare_input(data[:], device)
    correct = result.model(batch).argmax(1) == batch["label"]
    result.model.train()
    return correct.float().mean().item()


def main() -> None:
    """Plan, train, and print the accuracy on held-out digits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--strategy", help="a strategy file, or a strategy as JSON: no search")
    parser.add_argument("--time-limit", type=float, default=30, help="seconds for the search")
    args = parser.parse_args()

    world = init()
    console = console_of(world.rank)
    torch.manual_seed(0)
    held_out = Digits(held_out=True)
    status, result, strategy = auto_accelerate(
        Cnn(),
        torch.optim.AdamW,
        Digits(held_out=False),
        loss_func,
        optim_args={"lr": 2e-3},
        dataloader_args={"batch_size": args.batch_size, "shuffle": True, "drop_last": True},
        load_strategy=args.strategy,
        time_limit=args.time_limit,
    )
    if not status:
        raise SystemExit("no strategy fits this machine")
    console.print(f"Strategy: {strategy}", soft_wrap=True)

    for epoch in range(args.epochs):
        result.dataloader.set_epoch(epoch)
        for batch in result.dataloader:
            batch = result.prepare_input(batch, world.device)
            loss = result.loss_func(batch, result.model(batch))
            loss.backward()
            result.optim.step()
            result.optim.zero_grad()
        found = accuracy(result, held_out, world.device)
        console.print(f"epoch {epoch + 1}  loss {loss.item():.3f}  held-out accuracy {found:.1%}")


if __name__ == "__main__":
    main()
