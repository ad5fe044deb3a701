"""What is worked out once for many steps is worked out for each that differs in anything that it follows from."""

from dataclasses import fields, replace

import pytest

from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, Matmul, Region, Segment, StepTimes, step_time
from atorch.cost.parallelism import replicate

BLOCK = Segment(
    name="blocks", count=8, is_block=True, num_params=1e8, num_trainable=9e7, split_params=8e7, expert_params=1e7,
    matmuls=(
        Matmul(rows=1e4, inner=1000, columns=9000, split="columns"),
        Matmul(rows=1e4, inner=9000, columns=1000, split="rows"),
    ),
    attention_flops=1e12, num_heads=8, num_kv_heads=8, num_ops=10, input_bytes=1e8, dispatched_bytes=1e8,
    working_bytes=1e8, outside=Region(saved_bytes=2e9, selective_bytes=1e9, traffic_bytes=1e9),
    inside=Region(saved_bytes=3e9, selective_bytes=1e9, traffic_bytes=1e9),
)  # fmt: skip
HEAD = Segment(name="head", num_params=1e8, num_trainable=1e8, matmuls=(Matmul(rows=1e4, inner=1000, columns=1e5),))
CLUSTER = ClusterSpec.load("8x8xH100-80GB")
AXES = {"tensor": 2, "sequence": 2, "context": 2, "data": 4, "pipeline": 2}
WHOLE = replicate(
    Cost(
        segments=(BLOCK, HEAD), traced_batch=1.0, batch_size=16.0, num_micro_batches=2.0, axes=AXES, tensor=2,
        sequence=2, context=2, expert=2, stages=2, recompute=0.5, hop_wait_s=1e-3, held_gathers=1.0,
        gathered_itemsize=2.0, param_offload=0.5, optim_offload=0.5, activation_offload=0.5, budget_bytes=4e9,
    )
)  # fmt: skip
OTHERS = {
    "segments": (replace(BLOCK, num_ops=1000), HEAD), "in_half": (BLOCK, HEAD), "in_autocast": (BLOCK, HEAD),
    "axes": AXES | {"data": 2, "zero": 2}, "schedule": "gpipe",
    "dtype": "bfloat16", "recompute_keeps": "selective", "comm": (), "device_bytes": 1e9,
    "attention": "written", "fp8": "tensorwise", "fp8_sent": "blocks", "attention_kernel": "flash3",
    "tensor_beside": "chunks",
}  # fmt: skip


@pytest.mark.parametrize("field", [each.name for each in fields(Cost)])
def test_what_is_shared_does_not_hide_a_difference(field):
    value = getattr(WHOLE, field)
    other = OTHERS[field] if field in OTHERS else not value if isinstance(value, bool) else 2 * value + (value == 0)
    changed = replace(WHOLE, **{field: other})
    shared = StepTimes(CLUSTER)
    assert shared.of(WHOLE) == step_time(WHOLE, CLUSTER)
    assert shared.of(changed) == step_time(changed, CLUSTER)
    assert shared.of(WHOLE) == step_time(WHOLE, CLUSTER)


@pytest.mark.parametrize("names", [("data", "tensor"), ("tensor", "data", "sequence"), ("context", "data", "tensor")])
def test_steps_share_what_is_sent_where_the_ranks_that_split_a_copy_are_the_same(names):
    """Axes before a split move its ranks to other nodes; those behind it do not."""
    others = [replace(WHOLE, axes={name: AXES[name] for name in dict.fromkeys([*names, *AXES])})]
    others.append(replace(WHOLE, axes=AXES | {"data": 16}, batch_size=4.0, num_micro_batches=0.5))
    shared = StepTimes(CLUSTER)
    for cost in (WHOLE, *others, WHOLE):
        assert shared.of(cost) == step_time(cost, CLUSTER)
    assert step_time(others[0], CLUSTER).exposed_comm_s > step_time(WHOLE, CLUSTER).exposed_comm_s


def test_products_that_add_gradients_read_and_write_them_once():
    """Without, what a product gave is written, read with what was there, and written."""
    cost = Cost(segments=(BLOCK, HEAD), traced_batch=1.0, batch_size=4.0, num_micro_batches=4.0, dtype="bfloat16")
    apart, fused = step_time(cost, CLUSTER), step_time(replace(cost, adds_in_products=True), CLUSTER)
    bandwidth = CLUSTER.device.memory_bandwidth * CLUSTER.device.efficiency.traffic
    in_products = 8 * 2 * 1000 * 9000 + 1000 * 1e5
    saved = 4 * 3 * 4.0 * (1 - 1 / 4) * in_products / bandwidth
    assert apart.traffic_s - fused.traffic_s == pytest.approx(saved)
    assert 0 <= fused.matmul_s - apart.matmul_s < saved  # as far as a product waits for memory
    few = replace(cost, traced_batch=2e4)  # products of few rows do nothing else
    slower = step_time(replace(few, adds_in_products=True), CLUSTER).matmul_s - step_time(few, CLUSTER).matmul_s
    assert slower == pytest.approx(4 * (2 * 4.0 - 2.0) * in_products / bandwidth)


def test_8_bit_weights_are_cast_once_where_they_are_kept():
    wide = tuple(replace(each, inner=1024, columns=8192) for each in BLOCK.matmuls)
    segments = (replace(BLOCK, matmuls=wide), HEAD)
    cost = Cost(segments=segments, traced_batch=1.0, batch_size=8.0, num_micro_batches=8.0, fp8="delayed")
    each, once = step_time(cost, CLUSTER), step_time(replace(cost, fp8_once=True), CLUSTER)
    weights = 8 * 2 * 1024 * 8192
    bandwidth = CLUSTER.device.memory_bandwidth * CLUSTER.device.efficiency.traffic
    assert each.traffic_s - once.traffic_s == pytest.approx(7 * 4 * weights / bandwidth)
    alone = replace(cost, num_micro_batches=1.0)
    assert step_time(alone, CLUSTER) == step_time(replace(alone, fp8_once=True), CLUSTER)


def test_sends_beside_computing_show_at_a_pipelines_ends_alone():
    apart, beside = (step_time(replace(WHOLE, sends_beside=each), CLUSTER) for each in (False, True))
    assert beside.exposed_comm_s < apart.exposed_comm_s
    assert beside.bubble_s == apart.bubble_s


def test_sends_of_a_tensor_split_hide_behind_products_alone():
    """As long as these take, and no longer, whatever else the copy computes."""
    split = replace(WHOLE, splits_norms=True, tensor_beside="chunks", context=1, sequence=1, expert=1)
    slow = replace(CLUSTER, intra_node=replace(CLUSTER.intra_node, bandwidth=1e9))
    apart, beside = (step_time(replace(split, tensor_beside=each), slow) for each in ("nothing", "chunks"))
    blocks = 2 * 4 * apart.matmul_s / 2  # of two micro-batches, half of the blocks on a stage
    assert 0 < apart.exposed_comm_s - beside.exposed_comm_s < 1.2 * blocks
