"""Output of the examples while they train: a progress bar on a terminal, plain lines elsewhere, on one process only."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from typing_extensions import Self

# Warnings that do not help the reader of an example. transformers imports torchao if it is installed, and that misses
# CUDA libraries on machines without CUDA; peft uses a name that transformers has renamed.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def console_of(rank: int) -> Console:
    """A console that prints on rank 0 only."""
    return Console(quiet=rank != 0, highlight=False)


class Progress:
    """Steps done, the loss, `tokens` a second and the time left: a bar on a terminal, about ten lines elsewhere.

    The loss is averaged over the last ten steps or so. It is read every tenth step only, because reading it waits for
    the device. The pace is that of the steps since the last reading.
    """

    def __init__(self, console: Console, num_steps: int, tokens_per_step: int, tokens: str = "tokens") -> None:
        self.console, self.num_steps, self.tokens_per_step, self.tokens = console, num_steps, tokens_per_step, tokens
        columns = (TextColumn("Training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.bar = Bar(*columns, console=console, disable=not console.is_terminal or console.quiet)
        self.task = self.bar.add_task("", total=num_steps)
        self.every = max(1, num_steps // 10) if self.bar.disable else 10
        self.done, self.loss = 0, torch.tensor(0.0)
        self.shown, self.shown_s = 0, 0.0  # steps done at the last display, and its time

    def __enter__(self) -> Self:
        self.bar.start()
        self.shown_s = time.perf_counter()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.bar.stop()

    def advance(self, loss: torch.Tensor) -> None:
        """Count one more step, with this loss."""
        self.done += 1
        self.loss = loss.detach() if self.done == 1 else self.loss + (loss.detach() - self.loss) / min(self.done, 10)
        if self.done % self.every == 0 or self.done == self.num_steps:
            self._show()
        self.bar.update(self.task, completed=self.done)

    def _show(self) -> None:
        now_s = time.perf_counter()
        step_s = (now_s - self.shown_s) / (self.done - self.shown)
        self.shown, self.shown_s = self.done, now_s
        rate, left_s = self.tokens_per_step / step_s, (self.num_steps - self.done) * step_s
        figures = f"loss {self.loss.item():.2f}  {rate:,.0f} {self.tokens}/s  {left_s:.0f} s left"
        self.bar.update(self.task, description=figures)
        if self.bar.disable:
            self.console.print(f"step {self.done:>4} of {self.num_steps}  {figures}")
