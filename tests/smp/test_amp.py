"""The scaler of smp is torch's, and skips on all processes where one has to."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, Optimizer

import atorch.smp as smp
from atorch.errors import ArgumentError
from tests.pool import Pool, on_ranks
from tests.smp.job import begun, several


def one(value: float = 1.0, **options: Any) -> tuple[nn.Parameter, Optimizer]:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), value)
    return parameter, (Adam([parameter], fused=True, **options) if options else SGD([parameter], lr=1.0))


def course(scaler: torch.amp.GradScaler, kind: str) -> list[tuple[float, float, float]]:
    parameter, optimizer = one(0.0) if kind == "sgd" else one(0.0, lr=0.1)
    seen = []
    for number in range(8):
        optimizer.zero_grad()
        factor = float("inf") if number in (2, 3) else 0.5
        scaler.scale((parameter * factor).sum()).backward()
        if kind == "sgd" and number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.grad is not None
        seen.append((scaler.get_scale(), parameter[0].item(), parameter.grad[0].item()))
    return seen


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_alone_it_is_torchs(kind: str) -> None:
    settings = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    plain, own = torch.amp.GradScaler("cpu", **settings), smp.amp.GradScaler("cpu", **settings)
    assert course(own, kind) == course(plain, kind)
    assert own.state_dict() == plain.state_dict()
    again = smp.amp.GradScaler("cpu")
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert course(again, kind) == course(plain, kind)


def test_one_process_with_a_session_is_torchs() -> None:
    with begun({}):
        assert course(smp.amp.GradScaler("cpu", 64.0), "sgd") == course(torch.amp.GradScaler("cpu", 64.0), "sgd")


def test_arguments_are_torchs() -> None:
    assert smp.amp.GradScaler("cpu", 8.0).get_scale() == 8.0
    assert smp.amp.GradScaler(device="cpu", init_scale=8.0).get_scale() == 8.0
    assert smp.amp.GradScaler(8.0, 3.0).get_growth_factor() == 3.0  # torch 1 had no device there
    assert smp.amp.GradScaler().is_enabled()  # on a CPU as well
    off = smp.amp.GradScaler(enabled=False)
    loss = torch.ones(())
    assert off.scale(loss) is loss
    with pytest.raises(AssertionError, match="growth factor"):
        smp.amp.GradScaler("cpu", growth_factor=1.0)
    if not torch.cuda.is_available():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not smp.amp.GradScaler("cuda").is_enabled()
        assert "CUDA is not available" in str(caught[0].message)


def stepped(rank: int, size: int, bad: int, config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    with nullcontext() if config is None else begun(config):
        return in_session(rank, size, bad, config is None, options)


def in_session(rank: int, size: int, bad: int, is_alone: bool, options: dict[str, Any]) -> Any:
    scaler = smp.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    if is_alone or rank == size - 1:  # the loss is on the last stage alone
        scaler.scale(torch.ones(()))
    parameter, optimizer = one(float("nan") if rank == bad else 16.0, **options)
    scaler.step(optimizer)
    scaler.update()
    skipped, scale = bool((parameter == 1).all()), scaler.get_scale()
    parameter.grad = torch.full((2,), 8.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return skipped, scale, bool((parameter == 1).all()), scaler.get_scale(), parameter.grad[0].item()


def test_all_skip_where_one_must(pool: Pool) -> None:
    config = {"partitions": 2, "ddp": True}
    ways = [(stepped, bad, config, options) for options in ({}, {"lr": 0.1}) for bad in (0, 3, -1)]
    found = pool.run(several, [*ways, (stepped, 3, None, {})], ranks=4)
    for *results, _ in found:
        assert results == [*[(True, 8.0, False, 16.0, 1.0)] * 2, (False, 32.0, False, 64.0, 0.25)] * 2
    assert [skipped for *_, (skipped, *_) in found] == [False, False, False, True], "each by itself without a session"


@on_ranks(2)
def test_one_that_cannot_unscale_stops_all(rank: int, size: int) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16 if rank else torch.float32))
    parameter.grad = torch.ones_like(parameter)
    told = "Attempting to unscale FP16 gradients." if rank else "rank 1 failed: .*Attempting to unscale FP16"
    with begun({"partitions": 2}), pytest.raises((ArgumentError, ValueError), match=told):
        smp.amp.GradScaler("cpu").step(SGD([parameter], lr=1.0))


@on_ranks(2)
def test_gradients_that_are_shards_go_with_whole_ones(rank: int, size: int) -> None:
    with begun({"sharded_data_parallel_degree": 2, "ddp": True}):
        model = nn.Linear(2, 2)
        whole = nn.Parameter(torch.ones(()))
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        scaler = smp.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = SGD([*model.parameters(), whole], lr=1.0)
        scaler.scale(model(torch.ones(1, 2)).sum() + whole).backward()
        if rank:
            model.weight.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert (whole.item(), scaler.get_scale()) == (1, 2.0)
