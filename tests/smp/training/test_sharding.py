"""Parameters or optimizer states that replicas share out: training, what each process keeps and saves, and failures."""

import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.errors import ArgumentError, AtorchError, StrategyError
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from tests.pool import Pool, on_ranks
from tests.smp.job import (
    STEPS,
    Way,
    batch_of,
    begun,
    distance,
    loss_of,
    made,
    plainly_trained,
    several,
    sgd,
    train_step,
    trained,
)

SHARDED = {"sharded_data_parallel_degree": 2, "ddp": True}


def share_of(model: Any, optimizer: Any) -> float:
    held: list[Any] = list(model.local_parameters())
    return sum(each.to_local().numel() for each in held) / sum(each.numel() for each in held)


@pytest.mark.parametrize(
    ("kind", "ranks", "config", "passes"),
    [
        ("gpt2", 4, {"sdp_gradient_clipping": 0.5, "pipeline": "simple"}, 1),
        ("cnn", 2, {"sdp_gradient_clipping": 0.0}, 2),
    ],
)
def test_training_is_plain_training(pool: Pool, kind: str, ranks: int, config: dict[str, Any], passes: int) -> None:
    limit = config["sdp_gradient_clipping"] or math.inf
    plain = plainly_trained(kind, ranks, passes=passes, clip=lambda given: nn.utils.clip_grad_norm_(given, limit))
    assert limit == math.inf or min(plain.norms) > limit, "or nothing is clipped"
    way = Way(passes=passes, look=share_of)
    for seen in pool.run(trained, kind, {**SHARDED, **config}, "mean", way, ranks=ranks):
        assert distance(kind, seen.state, plain.state) < 1e-4
        assert 0.4 < seen.seen < 0.6


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.nightly), "fp16"])
def test_in_16_bits(pool: Pool, dtype: str) -> None:
    plain = plainly_trained("gpt2", 2)
    for seen in pool.run(trained, "gpt2", {**SHARDED, dtype: True, "sdp_gradient_clipping": 0.0}):
        state = seen.state
        assert {each.dtype for each in state.values()} == {torch.bfloat16 if dtype == "bf16" else torch.float16}
        assert distance("gpt2", {name: each.float() for name, each in state.items()}, plain.state) < 5e-2


@smp.step
def failing_step(model: Any, data: Tensor, target: Tensor, place: str) -> Tensor:
    if place == "before":
        raise ValueError("before the model")
    loss = nn.functional.nll_loss(model(data), target)
    if place == "behind":
        raise ValueError("behind the model")
    model.backward(loss)
    return loss


@smp.step
def look(model: Any, data: Tensor) -> Tensor:
    return model(data).sum()


def failing(rank: int, size: int, place: str) -> tuple[str, float]:
    with begun({"microbatches": 2, **SHARDED}):
        model = smp.DistributedModel(made("cnn"))
        smp.DistributedOptimizer(sgd(model))
        data, target = batch_of("cnn", 0, rank)
        told = ""
        with pytest.raises(ArgumentError, match="every step is one of all replicas"), model.join():
            pass
        try:
            failing_step(model, data, target, place if rank else "")
        except (AtorchError, ValueError) as error:
            told = str(error)
        with torch.no_grad():
            looked = float(look(model, data).reduce_sum())
        return told, looked


def test_where_one_fails_all_do(pool: Pool) -> None:
    model, places = made("cnn"), ("before", "behind")
    right = [float(model(batch_of("cnn", 0, rank)[0]).sum().detach()) for rank in range(2)]
    firsts, seconds = pool.run(several, [(failing, place) for place in places])
    for place, (first, one), (second, other) in zip(places, firsts, seconds, strict=True):
        assert [one, other] == pytest.approx(right, rel=1e-4)
        assert first == f"rank 1 failed: ValueError: {place} the model"
        assert second == f"{place} the model"


def failing_inside(rank: int, size: int, place: str, bad: Collection[int]) -> tuple[list[str], dict[str, Tensor]]:
    with begun({"microbatches": 2, **SHARDED, "sdp_gradient_clipping": 0.0}):
        whole, fails = made("cnn"), False

        def fail(*_: Any) -> None:
            if fails:
                raise ValueError(f"in {place}")

        def behind(module: nn.Module, args: Any, output: Tensor) -> None:
            if place == "forward":
                fail()
            elif output.requires_grad:
                output.register_hook(fail)

        whole.get_submodule("conv2").register_forward_hook(behind)
        model = smp.DistributedModel(whole)
        optimizer = smp.DistributedOptimizer(sgd(model))
        told = []
        for step in range(STEPS + len(bad)):
            optimizer.zero_grad()
            fails = step in bad and rank == 1
            try:
                train_step(model, "cnn", *batch_of("cnn", step, rank), "mean")
            except (AtorchError, ValueError) as error:
                told.append(str(error))
            else:
                optimizer.step()
        return told, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("place", "bad"),
    [("forward", {0, 3}), ("backward", {2, 3}), pytest.param("backward", {0}, marks=pytest.mark.nightly)],
)
def test_where_one_fails_inside_of_the_model_all_do_and_may_go_on(pool: Pool, place: str, bad: Collection[int]) -> None:
    model = made("cnn")
    optimizer = sgd(model)
    for step in sorted(set(range(STEPS + len(bad))) - set(bad)):
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of("cnn", model, *batch_of("cnn", step, replica), "mean") / 2).backward()
        optimizer.step()
    (first, one), (second, other) = pool.run(failing_inside, place, bad)
    assert first == [f"rank 1 failed: ValueError: in {place}"] * len(bad)
    assert second == [f"in {place}"] * len(bad)
    for state in (one, other):
        assert distance("cnn", state, model.state_dict()) < 1e-4


def states_of(model: Any, optimizer: Any) -> tuple[dict[str, Any], float]:
    """The whole state of the optimizer, and the share of this partition's that is kept here."""
    kept = sum(each.numel() for held in optimizer.inner.state.values() for each in held.values() if each.dim())
    own = sum(each.numel() for each in model.local_parameters())
    partial = optimizer.local_state_dict()
    assert partial["state"].keys() == dict(model.local_named_parameters()).keys()
    return optimizer.state_dict(), kept / own


def test_training_and_states_are_those_of_plain_training(pool: Pool) -> None:
    plain = plainly_trained("gpt2", 2, decay=0.5)
    wanted = plain.optimizer.state_dict()
    way = Way(decay=0.5, look=states_of)  # as a scheduler of the optimizer that was given does
    for seen in pool.run(trained, "gpt2", {"shard_optimizer_state": True, "partitions": 2}, "mean", way, ranks=4):
        saved, kept = seen.seen
        assert distance("gpt2", seen.state, plain.state) < 1e-4
        assert 0.45 < kept < 0.55, "the momentum of half of the parameters"
        assert saved["state"].keys() == wanted["state"].keys()
        for number, held in wanted["state"].items():
            for key, value in held.items():
                assert (saved["state"][number][key] - value).abs().max() < 1e-4
        assert saved["param_groups"][0]["lr"] == wanted["param_groups"][0]["lr"]
        plain.optimizer.load_state_dict(saved)


@on_ranks(2)
def test_masters_are_shared_out_too(rank: int, size: int) -> None:
    with begun({"ddp": True, "shard_optimizer_state": True, "fp16": True}):
        model = smp.DistributedModel(made("cnn"))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=256.0)
        train_step(model, "cnn", *batch_of("cnn", 0, rank), "mean")
        optimizer.step()
        inner: Any = optimizer.inner
        assert isinstance(inner.inner, ShardedOptimizer)
        masters = sum(each.numel() for each in inner.inner.inner.shadows.values())
        assert 0.4 < masters / sum(each.numel() for each in model.parameters()) < 0.6


@on_ranks(4)
def test_a_pipeline_and_an_optimizer_that_needs_all_parameters_are_refused(rank: int, size: int) -> None:
    lamb = smp.optimizers.FusedLamb
    for config, kind, told in (
        ({**SHARDED, "partitions": 2}, torch.optim.SGD, "degree is 2 .*pipeline_parallel_degree is 2"),
        ({"ddp": True, "shard_optimizer_state": True}, lamb, "shard_optimizer_state.*FusedLamb|FusedLamb.*_state"),
    ):
        with begun(config):
            model = smp.DistributedModel(made("cnn"))
            smp.DistributedOptimizer(kind(model.parameters(), lr=1e-3))
            with pytest.raises(StrategyError, match=told):
                train_step(model, "cnn", *batch_of("cnn", 0, rank), "mean")
