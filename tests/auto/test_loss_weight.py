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


@pytest.mark.parametrize("name", ["labels", "causal", "by row"])
@pytest.mark.parametrize("beside", [[], [("micro_batch", {"size": 2})]], ids=["whole", "in micro-batches"])
def test_labels_that_differ_in_later_batches_alone(pool, name, beside):
    assert max(pool.run(later, name, ["ddp", *beside], ranks=2)) <= EXACT


@pytest.mark.parametrize("name", ["sum", "labels", "mask", "causal"])
def test_one_row_a_rank(pool, name):
    assert max(pool.run(alone, name, ["fsdp"], ranks=2)) <= EXACT


def later(rank, size, name, strategy):
    return deviation(rank, size, name, strategy, full_first=True)


def alone(rank, size, name, strategy):
    return deviation(rank, size, name, strategy, batch_size=size)


SPLIT = {
    "tensor": ["tensor_parallel", "ddp"],
    "pipeline": [("pipeline_parallel", {"split_points": ["layers.1"], "micro_batches": 2}), "ddp"],
}


@pytest.mark.parametrize("name", ["sum", "labels"])
@pytest.mark.parametrize("axis", SPLIT)
def test_beside_what_splits_the_model(pool, axis, name):
    mesh = ("parallel_mode", ([(axis, 2), ("data", 2)], None))
    assert max(pool.run(deviation, name, [mesh, *SPLIT[axis]], ranks=4)) <= EXACT


@pytest.mark.parametrize("name", ["sum", "labels"])
@pytest.mark.parametrize("beside", [[], [("micro_batch", {"size": 2})]], ids=["whole", "in micro-batches"])
def test_loss_scales(pool, beside, name):
    assert max(pool.run(deviation, name, ["ddp", ("amp_native", "fp16"), *beside], ranks=2)) <= 1e-2
