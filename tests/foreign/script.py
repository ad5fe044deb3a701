"""What a training script is here: the arguments that it would give to auto_accelerate, and its loop.

    script = SCRIPTS["nanogpt"]                        # of tests/foreign/models.py
    losses = script.train([plain(each) for each in script.make()], 10)
    losses = script.train([accelerated(each, ["fsdp"]) for each in script.make(processes=2)], 10)

The loops are those of the scripts, written afresh: only what makes the optimizer and the loader, calls the loss
function and clips is replaced. The same loop trains plainly and under every strategy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from atorch import auto_accelerate, clip_grad_norm

Arguments = dict[str, Any]  # of auto_accelerate, the model included


class Training(NamedTuple):
    """What a loop needs, made plainly or by auto_accelerate."""

    model: nn.Module
    optim: Any
    dataloader: Any
    loss_func: Any
    prepare_input: Any
    lr_scheduler: Any
    clip: Callable[[nn.Module, float], torch.Tensor]
    methods: tuple[str, ...] = ()  # of the strategy

    def batches(self) -> Iterator[Any]:
        """Prepared batches without end, epoch after epoch."""
        device = next(self.model.parameters()).device
        while True:
            for batch in self.dataloader:
                yield self.prepare_input(batch, device)


class Step(NamedTuple):
    """What a loop saw of a step."""

    loss: float
    weight: float = 1.0
    """What the loss counts in the mean over processes: 1, or the tokens that it is a mean of."""
    norm: float | None = None
    """Of all gradients together, where the loop looked at it."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script of the structure of a well-known one.

    make: `(processes=1, dropout=0.0, scale=1)` to the arguments of auto_accelerate for each of its models, which have
        the same weights every time; widths are times `scale`.
    train: the loop, on as many trainings as `make` has models.
    loss: what the script's loss is: the mean over samples or tokens, or their sum.
    across_rows: the samples of a batch see one another (BatchNorm), so that processes see what shares of a batch see.
    dropout: the probability in the original's default, for processes that draw the same random numbers.
    """

    make: Callable[..., list[Arguments]]
    train: Callable[[Sequence[Training], int], list[Step]]
    loss: str = "mean"
    across_rows: bool = False
    dropout: float = 0.0


def accelerated(arguments: Arguments, load_strategy: Any = None, **more: Any) -> Training:
    """A training by auto_accelerate."""
    status, result, strategy = auto_accelerate(**arguments, load_strategy=load_strategy, **more)
    assert status
    assert result is not None
    assert strategy is not None
    return Training(*result[:5], result.lr_scheduler, clip_grad_norm, strategy.names())


def plain(arguments: Arguments, shares: int = 1) -> Training:
    """The same in plain PyTorch, on one process; the model sees each of so many shares of a batch for itself."""
    given = dict(arguments)
    model = given["model"]
    groups = given.get("optim_param_func") or (lambda each: each.parameters())
    optim = given["optim_func"](groups(model), **given.get("optim_args", {}))
    make_scheduler = given.get("lr_scheduler_cls")
    return Training(
        model if shares == 1 else Shares(model, shares),
        optim,
        DataLoader(given["dataset"], **given["dataloader_args"]),
        given["loss_func"],
        given.get("prepare_input") or (lambda batch, device: batch),
        make_scheduler and make_scheduler(optim, **given.get("lr_scheduler_args", {})),
        lambda each, max_norm: nn.utils.clip_grad_norm_(each.parameters(), max_norm),
    )


class Shares(nn.Module):
    """A model that sees the shares of a batch that processes would see, one after the other: rows r, r + n, ..."""

    def __init__(self, model: nn.Module, num: int) -> None:
        super().__init__()
        self.model, self.num = model, num

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        outputs = [
            self.model(
                *(each[first :: self.num] for each in args),
                **{name: each[first :: self.num] for name, each in kwargs.items()},
            )
            for first in range(self.num)
        ]
        return torch.stack(outputs, 1).flatten(0, 1)


class Samples(Dataset[Any]):
    """Samples that a function of their index makes, the same every time."""

    def __init__(self, num: int, make: Callable[[int], Any]) -> None:
        self.samples = [make(index) for index in range(num)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def drawn(index: int) -> torch.Generator:
    """The random numbers of a sample."""
    return torch.Generator().manual_seed(1000 + index)
