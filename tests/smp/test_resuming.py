"""Training that goes on from a checkpoint, at the degree that saved it and at another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import atorch.smp as smp
from tests.pool import Pool
from tests.smp.job import begun
from tests.smp.test_step import WIDTH, Blocks, train

STEPS = 4


def made() -> tuple[Any, Any]:
    """A script's model and optimizer."""
    torch.manual_seed(0)
    whole = Blocks()
    smp.set_tensor_parallelism(whole)
    model = smp.DistributedModel(whole)
    return model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))


def trained(model: Any, optimizer: Any, steps: range) -> list[float]:
    """The loss of each step, of batches that follow from its number."""
    losses = []
    for step in steps:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses.append(float(train(model, batch).reduce_mean()))
        optimizer.step()
    return losses


def first_half(rank: int, size: int, path: str, config: dict[str, Any]) -> list[float]:
    """Train, save after the second step both ways, and train on."""
    with begun(config):
        model, optimizer = made()
        losses = trained(model, optimizer, range(2))
        smp.save_checkpoint(path, "two", model=model, optimizer=optimizer, user_content={"step": 2})
        smp.save_checkpoint(path, "whole", partial=False, model=model)
        state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        if smp.rdp_rank() == 0:
            smp.save(state, f"{path}/by_hand.pt")
        smp.barrier()
        return losses + trained(model, optimizer, range(2, STEPS))


def second_half(rank: int, size: int, path: str, config: dict[str, Any], way: str) -> list[float]:
    """Go on from there."""
    with begun(config):
        model, optimizer = made()
        if way == "late":  # once the model is partitioned
            trained(model, optimizer, range(10, 11))
        if way == "by hand":
            state = smp.load(f"{path}/by_hand.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return trained(model, optimizer, range(2, STEPS))
        content = smp.resume_from_checkpoint(path)
        return trained(model, optimizer, range(content["step"], STEPS))


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"microbatches": 2}),
    "two stages": (2, {"partitions": 2, "microbatches": 2}),
    "two slices": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "microbatches": 2}),
    "two shards": (2, {"ddp": True, "sharded_data_parallel_degree": 2, "microbatches": 2, "sdp_gradient_clipping": 0}),
    "two states": (2, {"ddp": True, "shard_optimizer_state": True, "microbatches": 2}),
}
SAMPLE = [("two stages", "one", "late"), ("two slices", "two stages", "early"), ("two shards", "one", "by hand")]


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.nightly)
        for case in itertools.product(CONFIGS, CONFIGS, ("early", "late", "by hand"))
    ],
)
def test_training_goes_on_as_if_it_had_not_ended(pool: Pool, tmp_path: Path, before: str, after: str, way: str) -> None:
    """Losses after the checkpoint are those of training that went on."""
    path = str(tmp_path)
    ranks, config = CONFIGS[before]
    right = pool.run(first_half, path, config, ranks=ranks)[0][2:]
    ranks, config = CONFIGS[after]
    for losses in pool.run(second_half, path, config, way, ranks=ranks):
        assert losses == pytest.approx(right, rel=1e-5)
