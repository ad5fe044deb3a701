"""A pipelined model is freed with the last reference to it."""

from __future__ import annotations

import gc
import weakref

from tests.foreign.script import accelerated
from tests.foreign.structures import STRUCTURES
from tests.foreign.test_structures import STRATEGIES
from tests.pool import Pool


def num_alive(rank: int, size: int) -> int:
    """The number of parameters that outlive their model after a pass."""
    job = accelerated(STRUCTURES["sam"].make(), STRATEGIES["pipeline"][size])
    parameters = [weakref.ref(each) for each in job.model.parameters()]
    batch = next(iter(job.dataloader))
    job.loss_func(batch, job.model(*batch)).backward()
    del job, batch
    gc.collect()
    return sum(each() is not None for each in parameters)


def test_no_parameter_outlives_its_model(pool: Pool) -> None:
    assert pool.run(num_alive) == [0, 0]
