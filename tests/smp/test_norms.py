"""Clipping by the norm of the whole model, whatever it is spread over, is that of plain training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.smp.session import session
from tests.pool import Pool
from tests.smp.job import MICROBATCHES, STEPS, batch_of, begun, distance, logged, made, plainly_trained, sgd, train_step
from tests.smp.test_parity import DEGREES

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


def clipped(
    rank: int, size: int, config: dict[str, Any], call: str, how: float
) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """The model after some steps, the norms of gradients, and what was logged."""
    with begun({"microbatches": MICROBATCHES, "ddp": True, **config}), logged() as told:
        whole = made("gpt2")
        smp.set_tensor_parallelism(whole)
        model = smp.DistributedModel(whole)
        optimizer = smp.DistributedOptimizer(sgd(model))
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            train_step(model, "gpt2", *batch_of("gpt2", step, session().mesh.rank("data", "zero")), "mean")
            norm: Any = CALLS[call](model, optimizer, how)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}, norms, told


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
    for state, found, told in pool.run(clipped, config, call, how, ranks=ranks):
        assert found == pytest.approx(plain.norms, rel=1e-4)
        assert distance("gpt2", state, plain.state) < 1e-4
        assert not any("clip_grad_norm_" in each for each in told)


@pytest.mark.parametrize("degrees", ["pipeline 2", pytest.param("tensor 2", marks=MATRIX)])
def test_torchs_own_clipping_of_a_part_is_told_once(pool: Pool, degrees: str) -> None:
    for _, _, told in pool.run(clipped, DEGREES[degrees][1], "torch's", 2.0):
        (said,) = (each for each in told if "clip_grad_norm_" in each)
        assert "call optimizer.clip_master_grads(max_norm)" in said


def test_without_a_limit_the_norm_is_told() -> None:
    with begun({}):
        model = smp.DistributedModel(nn.Linear(2, 2))
        smp.step(lambda data: model.backward(model(data).sum()))(torch.ones(1, 2))
        assert float(model.clip_grad_norm_(math.inf, "inf")) == 1.0  # type: ignore[arg-type]
