"""Training by `smp` gives the losses, the model and, clipped, the norms that plain training gives."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import atorch.smp as smp
from tests.auto.training import messages
from tests.pool import Pool
from tests.smp.job import Trained, Way, begun, distance, plainly_trained, trained

DEGREES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "pipeline 2": (2, {"partitions": 2}),
    "data 2": (2, {}),
    "pipeline 2 data 2": (4, {"partitions": 2}),
    "pipeline 4": (4, {"partitions": 4}),
    "tensor 2": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "tensor 2 pipeline 2": (4, {"tensor_parallel_degree": 2, "partitions": 2, "prescaled_batch": True}),
}


SAMPLE = {
    ("cnn", "pipeline 2", "simple", "sum"),
    ("gpt2", "pipeline 2 data 2", "interleaved", "mean"),
    ("llama", "tensor 2 pipeline 2", "simple", "mean"),
}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.nightly, id=" ".join(case))
    for case in product(["gpt2", "llama", "cnn"], DEGREES, ["interleaved", "simple"], ["mean", "sum"])
]


@pytest.mark.parametrize(("kind", "degrees", "schedule", "reduction"), CASES)
def test_losses_and_updates_are_those_of_plain_training(
    pool: Pool, kind: str, degrees: str, schedule: str, reduction: str
) -> None:
    ranks, config = DEGREES[degrees]
    results = pool.run(trained, kind, {"pipeline": schedule, **config}, reduction, ranks=ranks)
    replicas = ranks // (config.get("partitions", 1) * config.get("tensor_parallel_degree", 1))
    plain = plainly_trained(kind, replicas, reduction)
    for seen in results:
        assert any(seen.losses == pytest.approx(losses, rel=1e-4) for losses in plain.losses)
        assert distance(kind, seen.state, plain.state) < 1e-4


def test_batches_of_tensor_ranks_become_one(pool: Pool) -> None:
    results = pool.run(trained, "gpt2", {"tensor_parallel_degree": 2})
    plain = plainly_trained("gpt2", 2)
    for seen in results:
        assert seen.losses == pytest.approx([sum(each) / 2 for each in zip(*plain.losses, strict=True)], rel=1e-4)
        assert distance("gpt2", seen.state, plain.state) < 1e-4


LIMIT = 0.02
SHARDED = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}
CALLS = {
    "optimizer.clip_master_grads": lambda model, optimizer, how: optimizer.clip_master_grads(LIMIT, how),
    "optimizer.clip_grad_norm": lambda model, optimizer, how: optimizer.clip_grad_norm(LIMIT, how),
    "model.clip_grad_norm_": lambda model, optimizer, how: model.clip_grad_norm_(LIMIT, how),
    "torch's": lambda model, optimizer, how: nn.utils.clip_grad_norm_(model.parameters(), LIMIT, how),
    "torch's of local_parameters": lambda model, optimizer, how: nn.utils.clip_grad_norm_(
        model.local_parameters(), LIMIT, how
    ),
}


def clip(call: str, how: float, model: Any, optimizer: Any) -> Any:
    return CALLS[call](model, optimizer, how)


def clipped(
    rank: int, size: int, kind: str, config: dict[str, Any], call: str, how: float
) -> tuple[Trained, list[str]]:
    with messages() as told:
        return trained(rank, size, kind, config, "mean", Way(clip=partial(clip, call, how))), told


MATRIX = pytest.mark.nightly


@pytest.mark.parametrize(
    ("degrees", "call", "how"),
    [
        ("tensor 2 pipeline 2", "optimizer.clip_grad_norm", 2.0),
        pytest.param("pipeline 2", "model.clip_grad_norm_", math.inf, marks=MATRIX),
        pytest.param("pipeline 2 data 2", "optimizer.clip_master_grads", 2.0, marks=MATRIX),
        pytest.param("tensor 2", "model.clip_grad_norm_", 3.0, marks=MATRIX),
        pytest.param("sharded 2", "model.clip_grad_norm_", 2.0, marks=MATRIX),
        pytest.param("sharded 2", "torch's", 2.0, marks=MATRIX),
        pytest.param("data 2", "torch's of local_parameters", 2.0, marks=MATRIX),
    ],
)
def test_clipping_is_plain_trainings(pool: Pool, degrees: str, call: str, how: float) -> None:
    ranks, config = (2, SHARDED) if degrees == "sharded 2" else DEGREES[degrees]
    replicas = ranks // (config.get("partitions", 1) * config.get("tensor_parallel_degree", 1))
    plain = plainly_trained("gpt2", replicas, clip=lambda given: nn.utils.clip_grad_norm_(given, LIMIT, how))
    assert min(plain.norms) > LIMIT, "or nothing is clipped"
    for seen, told in pool.run(clipped, "gpt2", config, call, how, ranks=ranks):
        assert seen.norms == pytest.approx(plain.norms, rel=1e-4)
        assert distance("gpt2", seen.state, plain.state) < 1e-4
        assert not any("clip_grad_norm_" in each for each in told)


@pytest.mark.parametrize("degrees", ["pipeline 2", pytest.param("tensor 2", marks=MATRIX)])
def test_torchs_own_clipping_of_a_part_is_told_once(pool: Pool, degrees: str) -> None:
    for _, told in pool.run(clipped, "cnn", DEGREES[degrees][1], "torch's", 2.0):
        (said,) = (each for each in told if "clip_grad_norm_" in each)
        assert "Call optimizer.clip_master_grads(max_norm)" in said


def test_without_a_limit_the_norm_is_told() -> None:
    with begun({}):
        model = smp.DistributedModel(nn.Linear(2, 2))
        smp.step(lambda data: model.backward(model(data).sum()))(torch.ones(1, 2))
        assert float(model.clip_grad_norm_(math.inf, "inf")) == 1.0  # type: ignore[arg-type]
