"""A run that was saved goes on under any strategy, on any number of processes, as the uninterrupted one.

A pair's states are equal bit for bit: parameters, and both moments of Adam. On the same processes so are the next
losses; elsewhere they are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import atorch
from atorch.errors import CheckpointError
from tests.language_models import gpt2, llama
from tests.pool import Pool

MESH = "parallel_mode"
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
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "gpt2": lambda: gpt2(**DROPOUT),
    "gpt2 with dropout": gpt2,
    "llama": lambda: llama(heads=6, kv_heads=2, width=48),
}
STEPS = 3


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def job(model: str, strategy: str, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"batch_size": 8, "shuffle": True, **options}
    return atorch.auto_accelerate(
        MODELS[model](), torch.optim.AdamW, Tokens(), optim_args={"lr": 1e-2}, dataloader_args=options,
        loss_func=lambda batch, output: output["loss"], model_input_format="unpack_dict",
        load_strategy=STRATEGIES[strategy][1],
    )[1]  # fmt: skip


def batches(result: Any) -> Iterator[Any]:
    for epoch in range(10):
        result.dataloader.set_epoch(epoch)
        yield from result.dataloader


def losses(result: Any, num: int) -> list[float]:
    it = batches(result)
    return [float(result.step(next(it))) for _ in range(num)]


def save(rank: int, size: int, folder: str, model: str, strategy: str) -> tuple[list[float], list[float]]:
    """Train, save, and go on: the losses before and after."""
    result = job(model, strategy)
    loop = batches(result)
    before = [float(result.step(next(loop))) for _ in range(STEPS)]
    atorch.save_checkpoint(folder, result, STEPS)
    return before, [float(result.step(next(loop))) for _ in range(STEPS)]


def go_on(rank: int, size: int, folder: str, model: str, strategy: str, again: str) -> list[float]:
    """Load, save what was loaded, and go on: the losses."""
    torch.manual_seed(rank)
    result = job(model, strategy)
    for parameter in result.model.parameters():  # nothing of the start is left
        if not hasattr(parameter, "home"):
            torch.nn.init.zeros_(parameter.to_local() if hasattr(parameter, "to_local") else parameter)
    resumed = atorch.load_checkpoint(folder, result)
    assert resumed.step == STEPS
    atorch.save_checkpoint(again, result, STEPS)
    return losses(result, STEPS)


def in_file(folder: Path) -> dict[str, torch.Tensor]:
    with atorch.Checkpoint.open(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def check(pool: Pool, tmp_path: Path, model: str, origin: str, target: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    saved = pool.run(save, str(first), model, origin, ranks=STRATEGIES[origin][0])
    found = pool.run(go_on, str(first), model, target, str(second), ranks=STRATEGIES[target][0])
    one, other = in_file(first), in_file(second)
    names = one.keys() | other.keys()
    assert {name for name in names if name not in one or name not in other} <= tied(names)
    for name in one.keys() & other.keys():
        assert torch.equal(one[name], other[name].to(one[name].dtype)), name
    means = [sum(by_rank) / len(by_rank) for by_rank in zip(*(after for _, after in saved), strict=True)]
    got = [sum(by_rank) / len(by_rank) for by_rank in zip(*found, strict=True)]
    if origin == target:
        assert got == means
    else:
        is_half = "half" in origin or "half" in target
        assert got == pytest.approx(means, rel=2e-2 if is_half else 1e-4)


def tied(names: Any) -> set[str]:
    """A pipeline's last stage has a tied head under a name of its own."""
    return {name for name in names if "lm_head" in name}


@pytest.mark.parametrize(
    ("origin", "target"),
    [("fsdp", "plain"), ("plain", "zero1"), ("tensor x fsdp", "chunk 2"), ("chunk 2", "pipeline"), ("zero1", "zero1")],
)
def test_sample_of_pairs(pool: Pool, tmp_path: Path, origin: str, target: str) -> None:
    check(pool, tmp_path, "gpt2 with dropout" if origin == target else "gpt2", origin, target)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("target", STRATEGIES)
@pytest.mark.parametrize("origin", STRATEGIES)
def test_every_pair(pool: Pool, tmp_path: Path, model: str, origin: str, target: str) -> None:
    check(pool, tmp_path, model, origin, target)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, strategy: str) -> None:
    check(pool, tmp_path, "gpt2 with dropout", strategy, strategy)


def test_without_a_checkpoint_a_run_starts(tmp_path: Path) -> None:
    assert atorch.resume_or_start(tmp_path / "none", job("gpt2", "plain")) == 0
    with pytest.raises(CheckpointError, match="none"):
        atorch.load_checkpoint(tmp_path / "none", job("gpt2", "plain"))
