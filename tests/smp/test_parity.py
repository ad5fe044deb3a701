"""Training by `smp` gives the losses and the model that plain training gives."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.pool import Pool
from tests.smp.job import distance, plainly_trained, trained

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
