"""Models of several kinds trained through the front door with their tokens on several ranks, beside plain training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from atorch import auto_accelerate
from atorch.profiler.memory_tracker import CommCounter
from tests.auto.training import steps
from tests.contract.job import distance, snapshot, updates
from tests.runtime.tensor_parallel.models import VOCAB, make

STEPS, BATCH, TOKENS = 3, 4, 16


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences, all different; some are padded behind where the model looks both ways."""

    def __init__(self, is_padded: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, VOCAB, (STEPS * BATCH, TOKENS), generator=generator)
        self.mask = torch.ones_like(self.tokens)
        if is_padded:
            self.mask[1::2, -3:] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "attention_mask": self.mask[index]}


def loss_func(batch: Any, output: Any) -> Tensor:
    """The mean of the samples', in which every logit of a token that is not padding has a weight of its own."""
    logits = output["logits"].float() * batch["attention_mask"][..., None]
    weights = torch.sin(torch.arange(logits[0].numel(), dtype=torch.float32)).view_as(logits[0])
    return (logits * weights).mean() * 10


def accelerated(model: nn.Module, name: str, strategy: Any, **more: Any) -> Any:
    return auto_accelerate(
        model,
        load_strategy=strategy,
        **{
            "optim_func": torch.optim.SGD,
            "optim_args": {"lr": 0.02},
            "dataset": Tokens(name == "bert"),
            "loss_func": loss_func,
            "model_input_format": "unpack_dict",
            "dataloader_args": {"batch_size": BATCH},
            **more,
        },
    )[1]


def plain(name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Updates and losses of the same global batches on one process."""
    model = make(name)
    before = snapshot(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.02)
    data = Tokens(name == "bert")
    rows = [slice(step * BATCH, (step + 1) * BATCH) for step in range(STEPS)]
    batches = ({"input_ids": data.tokens[part], "attention_mask": data.mask[part]} for part in rows)
    losses, _ = steps(model, optim, loss_func, batches)
    return updates(before, snapshot(model)), losses


def trained(rank: int, size: int, name: str, strategy: Any) -> dict[str, Any]:
    """The documented loop: distances from plain training, and the sends of a step."""
    model = make(name)
    before = snapshot(model)
    result = accelerated(model, name, strategy)
    losses, sends = [], []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, torch.device("cpu"))
        with CommCounter() as sent:
            loss = result.loss_func(batch, result.model(**batch))
            loss.backward()
        sends.append(sum(calls for (kind, _), (calls, _) in sent.counts.items() if kind == "send"))
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    expected, expected_losses = plain(name)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    errors = (mean / size - torch.tensor(expected_losses, dtype=torch.float64)).abs()
    return {
        "update": distance(updates(before, snapshot(result.model)), expected),
        "loss": float(errors.max()),
        "sends": sends,
    }
