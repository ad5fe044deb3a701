"""Contents of a checkpoint other than the model, and saves that fail, overlap or do not fit."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
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
from tests.auto.checkpointing import MESH, job, normed, small_job
from tests.auto.training import run_each
from tests.pool import Pool, RankFailure, on_ranks


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
    layers = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(3))
    result = small_job(strategy, lambda: nn.Sequential(*layers).to(memory_format=torch.channels_last), (6, 4, 4))
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


class Rows(nn.Module):
    """A weight with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.table(batch.abs().mul(4).long().clamp(max=8)).sum(1)


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

    def matrices() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))

    model: Any = Rows if kind == "SparseAdam" else matrices
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
        "LBFGS": "LBFGS's state d of 0.weight has shape",
    },
}  # fmt: skip


@pytest.mark.parametrize("strategy", REFUSED)
def test_optimizers_of_torch_go_on_or_are_refused_by_name(pool: Pool, tmp_path: Path, strategy: str) -> None:
    cases = [(str(tmp_path / kind), strategy, kind) for kind in sorted(KINDS)]
    for (_, _, kind), errors in zip(cases, run_each(pool, optimizer_resumed, cases), strict=True):
        refusal = REFUSED[strategy].get(kind)
        assert all(error == "" if refusal is None else refusal in error for error in errors), (kind, errors)


def longer() -> nn.Module:
    """The same model with one more layer, which no pass uses."""
    model = normed()
    model.head.more = nn.Linear(1, 1)
    return model


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
    grown = small_job([], longer)
    with pytest.raises(CheckpointError, match=r"lacks head\.more\."):
        atorch.load_checkpoint(tmp_path, grown)
    atorch.load_checkpoint(tmp_path, grown, strict=False)
    assert torch.equal(grown.model.head.weight, result.model.head.weight)
    assert set(grown.optim.state) == set(grown.model.parameters()) - set(grown.model.head.more.parameters())


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
        return inner(batch.view(-1, 1)) * self.scale * getattr(self, "$").sum() + self.empty.sum()


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
        "from tests.auto.checkpointing import small_job\n"
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


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    more = [parameter for name, parameter in model.named_parameters() if "more" in name]
    old = [parameter for name, parameter in model.named_parameters() if "more" not in name]
    return [{"params": old, "lr": 0.5}, *([{"params": more, "lr": 0.25}] if more else [])]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@on_ranks(2)
def test_a_new_group_keeps_its_settings(rank: int, size: int, tmp_path: Path, strategy: str) -> None:
    result = small_job([strategy], optim_param_func=groups_of)
    result.step(next(iter(result.dataloader)))
    atorch.save_checkpoint(tmp_path, result, 1)
    grown = small_job([strategy], longer, optim_param_func=groups_of)
    for group in grown.optim.param_groups:
        group["lr"] /= 2
    atorch.load_checkpoint(tmp_path, grown, strict=False)
    assert [group["lr"] for group in grown.optim.param_groups] == [0.5, 0.125]


def test_without_a_checkpoint_a_run_starts(tmp_path: Path) -> None:
    assert atorch.resume_or_start(tmp_path / "none", small_job([])) == 0
    with pytest.raises(CheckpointError, match="none"):
        atorch.load_checkpoint(tmp_path / "none", small_job([]))
