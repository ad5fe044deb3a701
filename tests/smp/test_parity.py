"""Training by `smp` gives the losses and the model that plain training gives."""

from __future__ import annotations

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
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "cnn"])
def test_losses_and_updates_are_those_of_plain_training(
    pool: Pool, kind: str, degrees: str, schedule: str, reduction: str
) -> None:
    ranks, config = DEGREES[degrees]
    results = pool.run(trained, kind, {"pipeline": schedule, **config}, reduction, ranks=ranks)
    replicas = ranks // config.get("partitions", 1)
    losses, state = plainly_trained(kind, replicas, reduction)
    for found, held in results:
        assert any(found == pytest.approx(each, rel=1e-4) for each in losses)
        assert distance(held, state) < 1e-4
