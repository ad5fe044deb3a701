"""Checkpointed activations that wait in host memory change nothing that is computed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import atorch.smp as smp
from atorch.runtime.memory import recompute
from atorch.smp.session import session
from tests.pool import Pool
from tests.smp.job import MICROBATCHES, STEPS, batch_of, begun, distance, loss_of, made, optimizer_of, train_step


def offloaded(rank: int, size: int, config: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The whole model after some steps, and how many tensors went to the host."""
    moved: list[int] = []
    to_host = recompute._to_host

    def noting(tensor: Tensor) -> Any:
        moved.append(tensor.numel())
        return to_host(tensor)

    with begun({"microbatches": MICROBATCHES, "ddp": True, **config}), mock.patch.object(recompute, "_to_host", noting):
        whole: Any = made("gpt2")
        for block in whole.transformer.h:
            smp.set_activation_checkpointing(block)
        model = smp.DistributedModel(whole)
        optimizer = smp.DistributedOptimizer(optimizer_of(model))
        for step in range(STEPS):
            optimizer.zero_grad()
            train_step(model, "gpt2", *batch_of("gpt2", step, session().mesh.rank("data", "zero")), "mean")
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}, len(moved)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(2, {"partitions": 2}), (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0})],
    ids=str,
)
def test_training_is_plain_training(pool: Pool, ranks: int, config: dict[str, Any]) -> None:
    model, replicas = made("gpt2"), ranks // config.get("partitions", 1)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            (loss_of("gpt2", model, *batch_of("gpt2", step, replica), "mean") / replicas).backward()
        optimizer.step()
    for offloads in (False, True):
        for state, moved in pool.run(offloaded, {**config, "offload_activations": offloads}, ranks=ranks):
            assert distance("gpt2", state, model.state_dict()) < 1e-4
            assert (moved >= STEPS * MICROBATCHES) == offloads
