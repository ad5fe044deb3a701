"""Jobs that are saved and go on: under strategies, and as scripts of smp and PatrickStar."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import atorch
import atorch.smp as smp
from atorch.patrickstar.runtime import initialize_engine
from tests.language_models import gpt2, llama


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


STEPS, FOUR, MESH = 3, "gpt2 of four layers", "parallel_mode"


STRATEGIES: dict[str, tuple[int, list[Any]]] = {
    "plain": (1, []),
    "ddp": (2, ["ddp"]),
    "zero1": (2, ["zero1"]),
    "fsdp": (2, ["fsdp"]),
    "fsdp 4": (4, ["fsdp"]),
    "tensor": (2, [(MESH, ([("tensor", 2)], None)), "tensor_parallel"]),
    "tensor x fsdp": (4, [(MESH, ([("tensor", 2), ("zero", 2)], None)), "tensor_parallel", "fsdp"]),
    "tensor x zero1": (4, [(MESH, ([("tensor", 2), ("zero", 2)], None)), "tensor_parallel", "zero1"]),
    "pipeline": (2, [(MESH, ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": 2})]),
    "chunk": (1, [("chunk", {"budget_bytes": 1_600_000})]),
    "chunk 2": (2, [("chunk", {"budget_bytes": 900_000})]),
    "half x fsdp": (2, [("half", "bf16"), "fsdp"]),
    "half x zero1": (2, [("half", "bf16"), "zero1"]),
    "offload": (1, [("offload", {"optimizer": 1.0})]),
}


SCRIPTS: dict[str, tuple[int, Any]] = {
    "smp": (2, {"pipeline_parallel_degree": 2}),
    "smp tensor": (4, {"tensor_parallel_degree": 2, "ddp": True, "shard_optimizer_state": True}),
    "smp half": (2, {"sharded_data_parallel_degree": 2, "ddp": True, "bf16": True, "sdp_gradient_clipping": 0}),
    "patrickstar in half": (1, None),
    "patrickstar in half 2": (2, None),
}


INTERLEAVED = [
    (MESH, ([("pipeline", 2)], None)),
    ("pipeline_parallel", {"schedule": "interleaved", "micro_batches": 2}),
]


JOBS: dict[str, tuple[int, Any]] = {**STRATEGIES, **SCRIPTS, "interleaved": (2, INTERLEAVED)}


RANKS = {name: ranks for name, (ranks, _) in JOBS.items()}


DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


MODELS = {
    "gpt2": lambda: gpt2(**DROPOUT),
    "gpt2 with dropout": gpt2,
    FOUR: lambda: gpt2(layers=4, **DROPOUT),
    "llama": lambda: llama(heads=6, kv_heads=2, width=48),
}


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def job(model: str, strategy: str, **options: Any) -> Any:
    torch.manual_seed(3)
    if strategy in SCRIPTS:
        rows = torch.stack([tokens["input_ids"] for tokens in map(Tokens().__getitem__, range(64))])
        return Script(MODELS[model](), rows, 8, 1e-2, SCRIPTS[strategy][1])
    options = {"batch_size": 8, "shuffle": True, **options}
    return atorch.auto_accelerate(
        MODELS[model](), torch.optim.AdamW, Tokens(), optim_args={"lr": 1e-2}, dataloader_args=options,
        loss_func=lambda batch, output: output["loss"], model_input_format="unpack_dict",
        load_strategy=JOBS[strategy][1],
    )[1]  # fmt: skip


def batches(result: Any, first_epoch: int = 0) -> Iterator[Any]:
    for epoch in range(first_epoch, 10):
        result.dataloader.set_epoch(epoch)
        yield from result.dataloader


def losses(result: Any, num: int, first_epoch: int = 0, skipped: int = 0) -> list[float]:
    it = itertools.islice(batches(result, first_epoch), skipped, None)
    return [float(result.step(next(it))) for _ in range(num)]


def savable(result: Any) -> Any:
    return result.model if isinstance(result, Script) else result


def end(result: Any) -> None:
    if isinstance(result, Script):
        result.end()


def in_file(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    with atorch.Checkpoint.open(folder, step) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def normed() -> nn.Module:
    """A model whose buffers differ by process."""
    return nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(8), head=nn.Linear(8, 1)))


def small_job(
    strategy: list[Any],
    model: Callable[[], nn.Module] = normed,
    shape: tuple[int, ...] = (8,),
    kind: str = "AdamW",
    **more: Any,
) -> Any:
    torch.manual_seed(0)
    data = list(torch.randn(32, *shape))
    return atorch.auto_accelerate(
        model(), getattr(torch.optim, kind), data, lambda batch, output: output.square().mean(),
        load_strategy=strategy, dataloader_args={"batch_size": 8}, optim_args={"lr": 1e-2}, **more,
    )[1]  # fmt: skip
