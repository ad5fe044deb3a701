"""Scripts of smp and PatrickStar with the calls of an `AccelerateResult`, for tests of checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import atorch.smp as smp
from atorch.patrickstar.runtime import initialize_engine


@smp.step
def train_step(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids)["loss"]
    model.backward(loss)
    return loss


class Script:
    """A model in training: by smp, configured by `config`, or by PatrickStar, for None.

    Args:
        rows: of all steps, each of which takes the next `batch_size`.
    """

    def __init__(self, model: nn.Module, rows: Tensor, batch_size: int, lr: float, config: dict[str, Any] | None):
        self.rows, self.batch_size, self.at = rows, batch_size, 0
        self.is_smp = config is not None
        if config is None:
            settings = {"optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}}}
            self.model, self.optim = initialize_engine(lambda: copy.deepcopy(model), 0, settings)
            self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            return
        smp.init({"microbatches": 2, **config})
        smp.set_tensor_parallelism(model)
        self.model = smp.DistributedModel(model)
        self.optim = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=lr))
        self.rank, self.size = smp.dp_rank(), smp.dp_size()

    @property
    def dataloader(self) -> Script:
        return self

    def set_epoch(self, epoch: int) -> None:
        """The rows have one order."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.rows[self.at * self.batch_size :][: self.batch_size][self.rank :: self.size]

    def step(self, ids: Tensor) -> Tensor:
        self.at += 1
        self.optim.zero_grad()
        if self.is_smp:
            loss: Any = train_step(self.model, ids).reduce_mean()
        else:
            loss = self.model(input_ids=ids, labels=ids)["loss"]
            self.model.backward(loss)
        self.optim.step()
        return loss.detach()

    def end(self) -> None:
        if self.is_smp:
            smp.shutdown()
