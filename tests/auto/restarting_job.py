"""A job for torchrun that resumes from its last checkpoint, and fails in each of its first lives."""

import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atorch import auto_accelerate, resume_or_start, save_checkpoint


def job(strategy: list[Any]) -> Any:
    """The result for a model that draws random numbers, on shuffled data."""
    data = list(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    model = nn.Sequential(OrderedDict(layers=layers))
    return auto_accelerate(
        model, torch.optim.AdamW, data, lambda batch, output: output.square().mean(), load_strategy=strategy,
        dataloader_args={"batch_size": 4, "shuffle": True}, optim_args={"lr": 1e-2}, timeout=60.0,
    )[1]  # fmt: skip


def losses_of(result: Any, step: int, until: int) -> Iterator[str]:
    """The losses of the steps from `step` to `until`, to the last bit."""
    while step < until:
        result.dataloader.set_epoch(step // len(result.dataloader))
        for batch in result.dataloader:
            yield float(result.step(batch)).hex()
            step += 1
            if step == until:
                return


def train(rank: int, size: int, folder: str, until: int, failure: str = "") -> list[str]:
    """The loss of each step; with a `failure`, rank 1 fails after the second step, before it is saved."""
    result = job(["ddp"])
    first = resume_or_start(folder, result)
    losses = []
    for step, loss in enumerate(losses_of(result, first, until), first + 1):
        losses.append(loss)
        with Path(folder, f"losses-{rank}").open("a") as file:
            file.write(f"{step} {loss}\n")
        if failure and step == first + 2 and rank == 1:
            if failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("this process fails")
        save_checkpoint(folder, result, step, keep_last=2)
    return losses


if __name__ == "__main__":
    folder, until, failure, num_failures = sys.argv[1:]
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    is_failing = life < int(num_failures)
    train(int(os.environ["RANK"]), 2, folder, int(until), failure if is_failing else "")
