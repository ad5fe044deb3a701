"""What the examples show while they train: a progress bar on a terminal, plain lines elsewhere, on one process only."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from typing_extensions import Self

# What other packages say that is not for the reader of an example: transformers imports torchao where it is installed,
# which misses CUDA libraries on machines without CUDA, and peft uses a name that transformers has renamed.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def console_of(rank: int) -> Console:
    """Where to print: the terminal on rank 0, nowhere on the others."""
    return Console(quiet=rank != 0, highlight=False)


class Progress:
    """Steps done of `num_steps`, the loss, `tokens` a second (given tokens a step), and the time left.

    The loss is read every tenth step only, because reading it waits for the device.
    """

    def __init__(self, console: Console, num_steps: int, tokens_per_step: int, tokens: str = "tokens") -> None:
        self.console, self.num_steps, self.tokens_per_step, self.tokens = console, num_steps, tokens_per_step, tokens
        self.bar = Bar(
            TextColumn("Training"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self.task = self.bar.add_task("train", total=num_steps, figures="")
        self.done, self.start_s = 0, time.perf_counter()

    def __enter__(self) -> Self:
        self.bar.start()
        self.start_s = time.perf_counter()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.stop()

    def advance(self, loss: torch.Tensor) -> None:
        """One more step is done, with this loss."""
        self.done += 1
        every = 10 if self.bar.disable is False else max(1, self.num_steps // 10)
        if self.done == 1 or self.done % every == 0 or self.done == self.num_steps:
            rate = self.done * self.tokens_per_step / (time.perf_counter() - self.start_s)
            figures = f"loss {loss.item():.3f}  {rate:,.0f} {self.tokens}/s"
            self.bar.update(self.task, figures=figures)
            if self.bar.disable:
                self.console.print(f"step {self.done:>5} of {self.num_steps}  {figures}")
        self.bar.update(self.task, completed=self.done)
