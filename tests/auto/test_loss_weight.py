"""On several processes gradients are those of the whole batch's loss, whatever the loss is a mean over, or a sum."""

import pytest

from tests.auto.loss_job import LOSSES, deviation

EXACT = 1e-4
SPLIT_BY_DATA = {
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "chunk": [("chunk", {"budget_bytes": 100_000})],
    "micro_batch": ["ddp", ("micro_batch", {"size": 3})],
    "one micro-batch": ["ddp", ("micro_batch", {"size": "auto"})],
    "micro_batch of fsdp": ["fsdp", ("micro_batch", {"size": 2, "reduce": "each"})],
}


@pytest.mark.parametrize("name", LOSSES)
def test_ddp_is_training_on_the_whole_batch(pool, name):
    assert max(pool.run(deviation, name, ["ddp"], ranks=2)) <= EXACT


@pytest.mark.parametrize("name", ["sum", "labels", "causal"])
@pytest.mark.parametrize("method", SPLIT_BY_DATA)
def test_every_way_to_share_out_samples(pool, method, name):
    assert max(pool.run(deviation, name, SPLIT_BY_DATA[method], ranks=2)) <= EXACT
