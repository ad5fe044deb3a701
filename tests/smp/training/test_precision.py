"""Training in 16 bits follows plain training in fp32, and fp16's loss scale does what its settings say."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.smp.steps.precision import DynamicScale, loss_scale_of
from tests.contract.job import distance as relative_distance
from tests.contract.job import updates
from tests.pool import Pool, on_ranks
from tests.smp.job import Plain, Way, batch_of, begun, made, plainly_trained, train_step, trained
from tests.smp.test_parity import DEGREES

BAND = 5e-2
"""How far 16 bits may be from fp32 in the updates' norm."""
LIMIT = 0.4
SAMPLE = [("fp16", "pipeline 2 data 2"), ("bf16", "tensor 2")]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return smp.optimizers.FusedLamb(model.parameters(), lr=0.01)


def clip(model: Any, optimizer: Any) -> Tensor:
    optimizer.update_master_grads()
    return optimizer.clip_master_grads(LIMIT)


def masters_of(model: Any, optimizer: Any) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    state, own = optimizer.state_dict()["state"], itertools.chain(*optimizer._names)
    masters = {name: state[number]["master"].clone() for number, name in enumerate(own)}
    return masters, {parameter.dtype for parameter in model.local_parameters()}


@torch.no_grad()
def deviation(kind: str, got: Mapping[str, Tensor], plain: Plain) -> float:
    before, expected = (dict(model.named_parameters()) for model in (made(kind), plain.model))
    assert got.keys() == expected.keys()
    return relative_distance(updates(before, dict(got)), updates(before, expected))


@pytest.mark.parametrize(
    ("dtype", "degrees"),
    [
        *SAMPLE,
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in itertools.product(("bf16", "fp16"), DEGREES)
            if case not in SAMPLE
        ),
    ],
)
def test_sixteen_bits_follow_plain_training(pool: Pool, dtype: str, degrees: str) -> None:
    """Under fp16 gradients are clipped, too, by the norm that plain training sees."""
    ranks, config = DEGREES[degrees]
    way, limit = Way(sgd, look=masters_of), math.inf
    if dtype == "fp16":
        way, limit = Way(sgd, {"static_loss_scale": 1024.0}, clip=clip, look=masters_of), LIMIT
    for kind in ("gpt2",) if degrees != "alone" else ("llama", "cnn"):
        replicas = ranks // (config.get("partitions", 1) * config.get("tensor_parallel_degree", 1))
        plain = plainly_trained(
            kind, replicas, optimizer_of=sgd, clip=lambda given: nn.utils.clip_grad_norm_(given, limit)
        )
        assert limit == math.inf or min(plain.norms) > limit, "or nothing is clipped"
        for seen in pool.run(trained, kind, {dtype: True, **config}, "mean", way, ranks=ranks):
            masters, types = seen.seen
            assert deviation(kind, masters, plain) < BAND
            assert types == {torch.bfloat16 if dtype == "bf16" else torch.float16}
            assert all(
                torch.equal(value.to(seen.state[name].dtype), seen.state[name]) for name, value in masters.items()
            )
            assert way.clip is None or seen.norms == pytest.approx(plain.norms, rel=2e-2)


@pytest.mark.parametrize("degrees", ["tensor 2 pipeline 2", pytest.param("pipeline 2", marks=pytest.mark.nightly)])
def test_lamb_takes_the_norms_of_the_whole_masters(pool: Pool, degrees: str) -> None:
    ranks, config = DEGREES[degrees]
    plain, way = (
        plainly_trained("gpt2", 1, optimizer_of=lamb),
        Way(lamb, {"static_loss_scale": 1024.0}, look=masters_of),
    )
    for seen in pool.run(trained, "gpt2", {"fp16": True, **config}, "mean", way, ranks=ranks):
        assert deviation("gpt2", seen.seen[0], plain) < BAND


@on_ranks(2)
def test_masters_begin_where_the_model_was(rank: int, size: int) -> None:
    with begun({"fp16": True, "ddp": True}):
        whole = made("cnn")
        before = {name: each.detach().clone() for name, each in whole.named_parameters()}
        if rank:  # the first one's values hold
            nn.init.zeros_(whole.fc1.weight)
        model = smp.DistributedModel(whole)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        train_step(model, "cnn", *batch_of("cnn", 0, 0), "mean")
        optimizer.step()
        state = optimizer.local_state_dict()["state"]
        assert all(torch.equal(state[name]["master"], value) for name, value in before.items())


@smp.step
def scaled_step(model: Any, data: Tensor, target: Tensor, factor: float) -> Tensor:
    loss = nn.functional.nll_loss(model(data), target) * factor
    model.backward(loss)
    return loss


@pytest.mark.parametrize("size", [1, 4])
@on_ranks(None)
def test_all_processes_skip_a_step_together(rank: int, size: int) -> None:
    """Of which some are not finite on one process alone: a replica's, of one stage."""
    partitions = max(1, size // 2)
    with begun({"fp16": True, "partitions": partitions, "ddp": True}):
        model = smp.DistributedModel(made("cnn"))
        optimizer = smp.DistributedOptimizer(
            sgd(model), static_loss_scale=None, dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 2.0**10, "scale_window": 2}, min_scale=2.0**9,
        )  # fmt: skip
        for step, scale in enumerate((2.0**10, 2.0**9, 2.0**9, 2.0**9, 2.0**10, 2.0**10)):
            skips = step in (1, 2)
            optimizer.zero_grad()
            data, target = batch_of("cnn", step, rank // partitions)
            scaled_step(model, data, target, 1e30 if skips and rank == size - 1 else 1.0)
            before = [each.detach().clone() for each in model.local_parameters()]
            optimizer.step()
            is_same = all(torch.equal(*pair) for pair in zip(before, model.local_parameters(), strict=True))
            assert (optimizer.overflow, optimizer.loss_scale, is_same) == (skips, scale, skips)


@on_ranks(1)
def test_the_scale_keeps_small_gradients_alive(rank: int, size: int) -> None:
    changes = []
    for scale in (1.0, 2.0**30):
        with begun({"fp16": True}):
            model = smp.DistributedModel(made("cnn"))
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e12), static_loss_scale=scale)
            before = [each.detach().half() for each in model.parameters()]
            scaled_step(model, *batch_of("cnn", 0, 0), 1e-12)
            optimizer.step()
            changes.append(
                max(float((a - b.detach()).abs().max()) for a, b in zip(before, model.parameters(), strict=True))
            )
    assert changes[0] == 0.0
    assert changes[1] > 1e-3


def test_a_dynamic_scale_does_what_its_settings_say() -> None:
    def course(overflows: str, **given: Any) -> list[float]:
        scale = loss_scale_of(None, True, given, {})
        scales = []
        for each in overflows:
            scale.update(each == "x")
            scales.append(scale())
        return scales

    assert loss_scale_of(None, True, None, {})() == DynamicScale().init_scale == 2.0**32
    assert course("..x.", init_scale=8, scale_window=2, scale_factor=4) == [8, 32, 8, 8]
    assert course("xxx", init_scale=8, min_scale=4) == [4, 4, 4]
    assert course("x.x", init_scale=8, delayed_shift=2) == [8, 8, 4]
    assert course("x.x", init_scale=8, delayed_shift=2, consecutive_hysteresis=True) == [8, 8, 8]
