"""A pipelined model is freed with the last reference to it."""

from __future__ import annotations

import gc
import weakref

from tests.foreign.script import accelerated
from tests.foreign.structures import STRUCTURES
from tests.foreign.test_structures import STRATEGIES
from tests.pool import on_ranks


@on_ranks()
def test_no_parameter_outlives_its_model(rank: int, size: int) -> None:
    job = accelerated(STRUCTURES["sam"].make(), STRATEGIES["pipeline"][size])
    parameters = [weakref.ref(each) for each in job.model.parameters()]
    batch = next(iter(job.dataloader))
    job.loss_func(batch, job.model(*batch)).backward()
    del job, batch
    gc.collect()
    assert sum(each() is not None for each in parameters) == 0
