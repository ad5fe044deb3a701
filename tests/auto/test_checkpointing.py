"""A run that was saved goes on under any strategy, on any number of processes, as the uninterrupted one.

A pair's states are equal bit for bit: parameters, and both moments of Adam. On the same processes so are the next
losses; elsewhere they are equal up to rounding.
"""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import atorch
from atorch.checkpoint import files
from atorch.checkpoint.shard_file import write_shard
from atorch.errors import ArgumentError, CheckpointError
from tests.auto.scripts import Script
from tests.auto.training import run_each
from tests.language_models import gpt2, llama
from tests.pool import Pool, RankFailure, on_ranks

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
    "gpt2 of four layers": lambda: gpt2(layers=4, **DROPOUT),
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


def save(rank: int, size: int, folder: str, model: str, strategy: str, options: Any) -> tuple[list[float], list[float]]:
    """Train, save, and go on: the losses before and after."""
    result = job(model, strategy, **options)
    loop = batches(result)
    before = [float(result.step(next(loop))) for _ in range(STEPS)]
    atorch.save_checkpoint(folder, savable(result), STEPS)
    after = [float(result.step(next(loop))) for _ in range(STEPS)]
    end(result)
    return before, after


def savable(result: Any) -> Any:
    return result.model if isinstance(result, Script) else result


def end(result: Any) -> None:
    if isinstance(result, Script):
        result.end()


def go_on(
    rank: int, size: int, folder: str, model: str, strategy: str, again: str, options: Any, skips: bool
) -> list[float]:
    """Load, save what was loaded, and go on: the losses."""
    torch.manual_seed(rank)
    result = job(model, strategy, **options)
    if isinstance(result, Script):
        losses(result, 1)  # its model is divided in the first step
        result.at = STEPS
    for parameter in result.model.parameters():  # nothing of the start is left
        if not hasattr(parameter, "home"):
            torch.nn.init.zeros_(parameter.to_local() if hasattr(parameter, "to_local") else parameter)
    resumed = atorch.load_checkpoint(folder, savable(result))
    assert resumed.step == STEPS
    atorch.save_checkpoint(again, savable(result), STEPS)
    # A checkpoint of a script has no position of a loader.
    after = losses(result, STEPS, skipped=STEPS if skips and not isinstance(result, Script) else 0)
    end(result)
    return after


def in_file(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    with atorch.Checkpoint.open(folder, step) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def check(pool: Pool, tmp_path: Path, model: str, origin: str, target: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = {} if {origin, target}.isdisjoint(SCRIPTS) else {"shuffle": False}
    saved = pool.run(save, str(first), model, origin, options, ranks=RANKS[origin])
    more = (str(second), options, origin in SCRIPTS)
    found = pool.run(go_on, str(first), model, target, *more, ranks=RANKS[target])
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
    [
        ("fsdp", "plain"), ("plain", "zero1"), ("tensor x fsdp", "chunk 2"), ("chunk 2", "pipeline"),
        ("zero1", "zero1"), ("plain", "smp tensor"), ("ddp", "smp"), ("smp", "patrickstar in half 2"),
    ],
)  # fmt: skip
def test_sample_of_pairs(pool: Pool, tmp_path: Path, origin: str, target: str) -> None:
    check(pool, tmp_path, "gpt2 with dropout" if origin == target else "gpt2", origin, target)


ALL = [*STRATEGIES, "smp"]
# Files have no trace of the strategy that wrote them: each is origin and target three times.
FEW = {(ALL[at], ALL[(at + shift) % len(ALL)]) for at in range(len(ALL)) for shift in (2, 5, 9)}


@pytest.mark.parametrize(
    ("origin", "target", "model"),
    [
        pytest.param(*pair, model, marks=pytest.mark.slow if pair in FEW else pytest.mark.nightly)
        for pair in itertools.product(ALL, ALL)
        for model in ("gpt2", "llama")
    ],
)
def test_every_pair(pool: Pool, tmp_path: Path, origin: str, target: str, model: str) -> None:
    check(pool, tmp_path, model, origin, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "target"),
    [("interleaved", target) for target in ("interleaved", "plain", "pipeline", "zero1")]
    + [(origin, "interleaved") for origin in ("plain", "pipeline", "tensor x fsdp", "fsdp 4")],
)
def test_interleaved_stages(pool: Pool, tmp_path: Path, origin: str, target: str) -> None:
    check(pool, tmp_path, "gpt2 of four layers", origin, target)


MOMENTS = (3, 8, 11)  # within an epoch, at its end, within the next


def read_by(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}


def losses_after_each_moment(
    rank: int, size: int, folder: str, strategy: str, workers: int
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """The losses of the steps after each moment, without an interruption and resumed."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a loader has children
    result = job("gpt2 with dropout", strategy, **read_by(workers))
    loop, all_losses = batches(result), []
    for step in range(1, MOMENTS[-1] + STEPS + 1):
        all_losses.append(float(result.step(next(loop))))
        if step in MOMENTS:
            atorch.save_checkpoint(folder, result, step)
    expected = {step: all_losses[step : step + STEPS] for step in MOMENTS}
    resumed = {}
    for step in MOMENTS:
        result = job("gpt2 with dropout", strategy, **read_by(workers))
        atorch.load_checkpoint(folder, result, step)
        resumed[step] = losses(result, STEPS, first_epoch=step // 8)
    return expected, resumed


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        pytest.param(name, num, marks=pytest.mark.slow if num == 0 or name == "fsdp" else pytest.mark.nightly)
        for name in STRATEGIES
        for num in (0, 2)
    ],
)
def test_a_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, strategy: str, workers: int) -> None:
    ranks = STRATEGIES[strategy][0]
    for expected, resumed in pool.run(losses_after_each_moment, str(tmp_path), strategy, workers, ranks=ranks):
        assert resumed == expected


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["plain", "tensor x fsdp", "pipeline", "chunk 2", "half x fsdp"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_and_strategies(pool: Pool, tmp_path: Path, script: str, strategy: str) -> None:
    check(pool, tmp_path / "out", "llama", script, strategy)
    check(pool, tmp_path / "in", "gpt2", strategy, script)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SCRIPTS)
def test_a_script_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, strategy: str) -> None:
    check(pool, tmp_path, "gpt2 with dropout", strategy, strategy)


def go_on_at_once(rank: int, size: int, folder: str, strategy: str) -> list[float]:
    result = job("gpt2", strategy)
    result.at = STEPS
    atorch.load_checkpoint(folder, result.model)
    after = losses(result, STEPS)
    result.end()
    return after


@pytest.mark.parametrize("strategy", ["smp", "patrickstar in half 2"])
def test_a_script_loads_before_its_first_step(pool: Pool, tmp_path: Path, strategy: str) -> None:
    saved = pool.run(save, str(tmp_path), "gpt2", strategy, {})
    assert pool.run(go_on_at_once, str(tmp_path), strategy) == [after for _, after in saved]


class Normed(nn.Module):
    """A model whose buffers differ by process."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(batch[0]))
        return output


class Convolutions(nn.Module):
    """Weights that do not lie in memory by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(6, 6, 3, padding=1) for _ in range(3)))
        self.to(memory_format=torch.channels_last)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch[0])
        return output


def small_job(
    strategy: list[Any],
    model: type[nn.Module] = Normed,
    shape: tuple[int, ...] = (8,),
    kind: str = "AdamW",
    **more: Any,
) -> Any:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, *shape))
    return atorch.auto_accelerate(
        model(), getattr(torch.optim, kind), data, lambda batch, output: output.square().mean(),
        load_strategy=strategy, dataloader_args={"batch_size": 8}, optim_args={"lr": 1e-2}, **more,
    )[1]  # fmt: skip


@on_ranks(2)
def test_buffers_that_differ_come_back_to_their_process(rank: int, size: int, tmp_path: Path) -> None:
    result = small_job(["zero1"])
    result.step(next(iter(result.dataloader)))
    expected = result.model.norm.running_mean.clone()
    atorch.save_checkpoint(tmp_path, result, 1)
    fresh = small_job(["zero1"])
    atorch.load_checkpoint(tmp_path, fresh)
    assert torch.equal(fresh.model.norm.running_mean, expected)
    means = [torch.empty_like(expected) for _ in range(size)]
    torch.distributed.all_gather(means, expected)
    assert not torch.equal(*means)


def convolutions(rank: int, size: int, folder: str, strategy: list[Any], saves: bool) -> list[float]:
    """The losses that follow two steps and a save, or a load."""
    result = small_job(strategy, Convolutions, (6, 4, 4))
    if not saves:
        atorch.load_checkpoint(folder, result)
    loop = iter(result.dataloader)
    if saves:
        for _ in range(2):
            result.step(next(loop))
        atorch.save_checkpoint(folder, result, 2)
    return [float(result.step(batch)) for batch in loop]


def test_moments_of_convolutions_by_channels_are_whole(pool: Pool, tmp_path: Path) -> None:
    """Processes that share a chunk have ranges of a weight in the order in which it lies in memory."""
    in_chunks = [("chunk", {"budget_bytes": 2**20})]
    saved = pool.run(convolutions, str(tmp_path), in_chunks, True)
    found = convolutions(0, 1, str(tmp_path), [], False)
    assert found == pytest.approx([sum(both) / 2 for both in zip(*saved, strict=True)], rel=1e-6)
    back = pool.run(convolutions, str(tmp_path), in_chunks, False)
    assert back == saved


@on_ranks(2)
def test_what_differs_between_processes_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    result = small_job(["ddp"])
    for call in (atorch.load_checkpoint, atorch.resume_or_start):
        with pytest.raises(ArgumentError, match="folder"):
            call(tmp_path / str(rank), result)
        with pytest.raises(ArgumentError, match="give the path of a folder"):
            call(None, result)
        with pytest.raises(ArgumentError, match="give a dict"):
            call(tmp_path, result, extra=[1])
    result = small_job(["ddp"])
    with pytest.raises(ArgumentError, match="extra"):
        atorch.save_checkpoint(tmp_path, result, 1, extra={"average": torch.full((2,), float(rank))})
    with pytest.raises(ArgumentError, match="step"):
        atorch.save_checkpoint(tmp_path, result, rank)


@on_ranks(2)
def test_an_extra_that_fits_on_one_process_alone(rank: int, size: int, tmp_path: Path) -> None:
    result = small_job(["ddp"])
    atorch.save_checkpoint(tmp_path, result, 1, extra={"best": nn.Linear(2, 2), "fixed": 3})
    with pytest.raises(CheckpointError, match="'best' .* does not fit the Linear"):
        atorch.load_checkpoint(tmp_path, result, extra={"best": nn.Linear(2 + rank, 2)})
    with pytest.raises(CheckpointError, match="'fixed' .* does not fit the Linear"):
        atorch.load_checkpoint(tmp_path, result, extra={"fixed": nn.Linear(2, 2)})


@on_ranks(2)
def test_ranks_of_one_batch_draw_alike_after_a_change_of_mesh(rank: int, size: int, tmp_path: Path) -> None:
    result = small_job(["ddp"])
    torch.manual_seed(rank)
    atorch.save_checkpoint(tmp_path, result, 1)
    fresh = small_job([(MESH, ([("tensor", 2)], None))])
    atorch.load_checkpoint(tmp_path, fresh)
    drawn = [torch.empty(3) for _ in range(size)]
    torch.distributed.all_gather(drawn, torch.rand(3))
    assert torch.equal(*drawn)


def test_a_checkpoint_has_the_scale_the_scheduler_and_extras(tmp_path: Path) -> None:
    scheduler = {"lr_scheduler_cls": torch.optim.lr_scheduler.StepLR, "lr_scheduler_args": {"step_size": 1}}
    result, average = small_job([("amp_native", "fp16")], **scheduler), nn.Linear(2, 2)
    result.step(next(iter(result.dataloader)))
    result.optim.scale.update(skipped=True)
    atorch.save_checkpoint(tmp_path, result, 1, extra={"average": average, "best": 0.25})
    fresh, other = small_job([("amp_native", "fp16")], **scheduler), nn.Linear(2, 2)
    resumed = atorch.load_checkpoint(tmp_path, fresh, extra={"average": other})
    assert (resumed.step, resumed.extra) == (1, {"best": 0.25})
    assert fresh.optim.scale.state_dict() == result.optim.scale.state_dict()
    assert fresh.lr_scheduler.get_last_lr() == result.lr_scheduler.get_last_lr()
    assert torch.equal(other.weight, average.weight)
    with pytest.raises(CheckpointError, match="'other'"):
        atorch.load_checkpoint(tmp_path, fresh, extra={"other": nn.Linear(2, 2)})
    for other in (nn.Linear(3, 2), torch.optim.SGD([torch.zeros(1)])):
        with pytest.raises(CheckpointError, match=f"'average' .* does not fit the {type(other).__name__}"):
            atorch.load_checkpoint(tmp_path, fresh, extra={"average": other})
    with pytest.raises(CheckpointError, match="plain.extra.fn"):
        atorch.save_checkpoint(tmp_path, result, 2, extra={"fn": print})


KINDS = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}


class Matrices(nn.Module):
    """Weights that all optimizers take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch[0])
        return output


class Rows(nn.Module):
    """A weight with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.table(batch[0].abs().mul(4).long().clamp(max=8)).sum(1)
        return output


def optimizer_resumed(rank: int, size: int, folder: str, strategy: str, kind: str) -> str:
    """The error that refuses an optimizer of torch; empty if a run with it goes on bit for bit."""

    def stepped(result: Any, batch: Any) -> float:
        if kind != "LBFGS":
            return float(result.step(batch))

        def closure() -> torch.Tensor:
            result.optim.zero_grad()
            loss: torch.Tensor = result.loss_func(batch, result.model(batch))
            loss.backward()
            return loss

        return float(result.optim.step(closure))

    model = Rows if kind == "SparseAdam" else Matrices
    try:
        result = small_job([strategy], model, kind=kind)
        loop = iter(result.dataloader)
        first = stepped(result, next(loop))
        atorch.save_checkpoint(folder, result, 1)
        expected = [stepped(result, batch) for batch in loop]
        assert expected != [first] * 3
        for other in (strategy, "ddp"):
            fresh = small_job([other], model, kind=kind)
            atorch.load_checkpoint(folder, fresh)
            losses = [stepped(fresh, batch) for batch in fresh.dataloader]
            assert losses == expected if other == strategy else losses == pytest.approx(expected, rel=1e-5)
        return ""
    except (ArgumentError, CheckpointError, atorch.errors.StrategyError) as error:
        return str(error)


REFUSED = {
    "ddp": {},
    "zero1": {"LBFGS": "LBFGS does not support"},
    "fsdp": {
        "Adafactor": "Adafactor does not support", "Rprop": "Rprop does not support", "SparseAdam": "with sparse=True",
        "LBFGS": "LBFGS's state d of layers.0.weight has shape",
    },
}  # fmt: skip


@pytest.mark.parametrize("strategy", REFUSED)
def test_optimizers_of_torch_go_on_or_are_refused_by_name(pool: Pool, tmp_path: Path, strategy: str) -> None:
    cases = [(str(tmp_path / kind), strategy, kind) for kind in sorted(KINDS)]
    for (_, _, kind), errors in zip(cases, run_each(pool, optimizer_resumed, cases), strict=True):
        refusal = REFUSED[strategy].get(kind)
        assert all(error == "" if refusal is None else refusal in error for error in errors), (kind, errors)


class Longer(Normed):
    """The same model with one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    result = small_job([])
    result.step(next(iter(result.dataloader)))
    atorch.save_checkpoint(tmp_path, result, 1)
    with pytest.raises(CheckpointError, match="lacks .* and has "):
        atorch.load_checkpoint(tmp_path, job("gpt2", "plain"))
    with pytest.raises(CheckpointError, match=r"AdamW.*SGD"):
        atorch.load_checkpoint(tmp_path, small_job([], kind="SGD"))
    with pytest.raises(ArgumentError, match="auto_accelerate returned"):
        atorch.save_checkpoint(tmp_path, result.model, 1)
    with pytest.raises(ArgumentError, match="load_checkpoint was given"):
        atorch.load_checkpoint(tmp_path, result.model)
    longer = small_job([], Longer)
    with pytest.raises(CheckpointError, match=r"lacks more\."):
        atorch.load_checkpoint(tmp_path, longer)
    atorch.load_checkpoint(tmp_path, longer, strict=False)
    assert torch.equal(longer.model.head.weight, result.model.head.weight)
    assert set(longer.optim.state) == set(longer.model.norm.parameters()) | set(longer.model.head.parameters())


def in_background(rank: int, size: int, folder: str, strategy: str) -> None:
    """Save three times; the next step is taken while the thread waits with its file."""
    result, taken = job("gpt2", strategy), threading.Event()
    loop = batches(result)

    def late(*args: Any) -> Any:
        assert taken.wait(60)
        return write_shard(*args)

    with mock.patch.object(files, "write_shard", late):
        for step in range(1, 4):
            result.step(next(loop))
            taken.clear()
            atorch.save_checkpoint(f"{folder}/beside", result, step, background=True)
            result.step(next(loop))
            taken.set()
    atorch.wait_for_checkpoint(result)


def in_foreground(rank: int, size: int, folder: str, strategy: str) -> None:
    result = job("gpt2", strategy)
    loop = batches(result)
    for step in range(1, 4):
        result.step(next(loop))
        atorch.save_checkpoint(f"{folder}/before", result, step)
        result.step(next(loop))


@pytest.mark.parametrize("strategy", ["chunk 2", pytest.param("half x zero1", marks=pytest.mark.slow)])
def test_a_checkpoint_in_the_background_has_the_values_of_its_step(pool: Pool, tmp_path: Path, strategy: str) -> None:
    for work in (in_background, in_foreground):
        pool.run(work, str(tmp_path), strategy, ranks=STRATEGIES[strategy][0])
    for step in range(1, 4):
        one, other = (in_file(tmp_path / name, step) for name in ("beside", "before"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@on_ranks(2)
def test_an_error_in_the_background_is_raised_by_the_next_call(rank: int, size: int, tmp_path: Path) -> None:
    result, write = small_job(["ddp"]), os.write
    atorch.save_checkpoint(tmp_path, result, 1, background=True)

    def no_space(handle: int, data: Any) -> int:
        if rank == 1 and len(data) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    for call in (lambda: atorch.save_checkpoint(tmp_path, result, 3), lambda: atorch.wait_for_checkpoint(result)):
        atorch.wait_for_checkpoint(result)
        with mock.patch.object(os, "write", no_space):
            atorch.save_checkpoint(tmp_path, result, 2, background=True)
            with pytest.raises(CheckpointError, match="rank 1 failed: .*No space|cannot be written: No space"):
                call()
        assert os.listdir(tmp_path / "step-000000001")
        assert not (tmp_path / "step-000000002").exists()
    assert atorch.load_checkpoint(tmp_path, result).step == 1
    atorch.save_checkpoint(tmp_path, result, 4, background=True)
    assert atorch.resume_or_start(tmp_path, result) == 4


class Odd(nn.Module):
    """Parameters of no dims and of no elements, under names that are hard to file."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 4))
        self.add_module(f"ünï/cödé {'x' * 300}", nn.Linear(1, 1))
        self.register_parameter("$", nn.Parameter(torch.ones(3)))

    def forward(self, batch: Any) -> Any:
        (_, inner), *_ = self.named_children()
        return inner(batch[0].float().view(-1, 1)) * self.scale * getattr(self, "$").sum() + self.empty.sum()


@on_ranks(2)
def test_odd_tensors_and_names(rank: int, size: int, tmp_path: Path) -> None:
    """From an optimizer with a fused kernel to one that cannot have it; in torch's inference mode."""
    result, other = small_job([("chunk", {"budget_bytes": 2**20})], Odd), small_job(["fsdp"], Odd)
    first, second, *_ = iter(result.dataloader)
    result.step(first)
    with torch.inference_mode():
        atorch.save_checkpoint(tmp_path, other, 0)
        atorch.save_checkpoint(tmp_path, result, 1)
    with torch.no_grad():
        next(iter(other.model.parameters())).zero_()
    with torch.inference_mode():
        atorch.load_checkpoint(tmp_path, other)
    assert float(other.step(second)) == float(result.step(second))
    atorch.export(other, tmp_path / "exported")
    atorch.load_pretrained(Odd(), tmp_path / "exported")


def waiting(rank: int, size: int, folder: str) -> None:
    """Wait for a checkpoint in which rank 1 is killed."""
    result, fsync = small_job(["ddp"]), os.fsync
    with mock.patch.object(os, "fsync", fsync if rank == 0 else lambda handle: os.kill(os.getpid(), signal.SIGKILL)):
        atorch.save_checkpoint(folder, result, 1, background=True)
        began = time.monotonic()
        with pytest.raises(ArgumentError, match="rank 1 did not come"):
            atorch.wait_for_checkpoint(result)
    assert result.checkpoint_writer.has_ended(5)
    Path(folder, "seconds").write_text(f"{time.monotonic() - began}")


def test_who_waits_for_a_checkpoint_notices_a_process_that_ends(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        pool.run(waiting, str(tmp_path))
    assert float((tmp_path / "seconds").read_text()) < 20
    assert [path.name for path in tmp_path.iterdir()] == ["seconds"]


def test_the_end_of_a_process_waits_for_the_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys, time; from unittest import mock; import atorch; from atorch.checkpoint import files\n"
        "from tests.auto.test_checkpointing import small_job\n"
        "write = files.write_shard\n"
        "files.write_shard, files._SHARE = lambda *args: (time.sleep(1), write(*args))[1], 1e-9\n"
        "atorch.save_checkpoint(sys.argv[1], small_job([]), 7, background=True)\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=120).returncode == 3
    for folder in (tmp_path, tmp_path / "step-000000007"):
        assert atorch.resume_or_start(folder, small_job([])) == 7
    (moved := tmp_path / "other place").mkdir()
    assert atorch.resume_or_start(folder.rename(moved / "best"), small_job([])) == 7


@on_ranks(2)
def test_a_save_that_another_one_removes_ends(rank: int, size: int, tmp_path: Path) -> None:
    first, second, begun = small_job(["ddp"]), small_job(["ddp"]), threading.Event()
    with mock.patch.object(files, "write_shard", lambda *args: (begun.wait(60), write_shard(*args))[1]):
        atorch.save_checkpoint(tmp_path, first, 1, background=True)
        atorch.save_checkpoint(tmp_path, second, 2, background=True)
        begun.set()
        with pytest.raises(CheckpointError, match="part was removed while it was written"):
            atorch.wait_for_checkpoint(first)
        atorch.wait_for_checkpoint(second)
    assert atorch.load_checkpoint(tmp_path, second).step == 2


class Grown(Normed):
    """The same model with one more layer, which has a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    more = {id(parameter) for parameter in model.more.parameters()} if hasattr(model, "more") else set()
    old = [parameter for parameter in model.parameters() if id(parameter) not in more]
    return [{"params": old, "lr": 0.5}, *([{"params": list(model.more.parameters()), "lr": 0.25}] if more else [])]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@on_ranks(2)
def test_a_new_group_keeps_its_settings(rank: int, size: int, tmp_path: Path, strategy: str) -> None:
    result = small_job([strategy], optim_param_func=groups_of)
    result.step(next(iter(result.dataloader)))
    atorch.save_checkpoint(tmp_path, result, 1)
    grown = small_job([strategy], Grown, optim_param_func=groups_of)
    for group in grown.optim.param_groups:
        group["lr"] /= 2
    atorch.load_checkpoint(tmp_path, grown, strict=False)
    assert [group["lr"] for group in grown.optim.param_groups] == [0.5, 0.125]


def test_without_a_checkpoint_a_run_starts(tmp_path: Path) -> None:
    assert atorch.resume_or_start(tmp_path / "none", job("gpt2", "plain")) == 0
    with pytest.raises(CheckpointError, match="none"):
        atorch.load_checkpoint(tmp_path / "none", job("gpt2", "plain"))
