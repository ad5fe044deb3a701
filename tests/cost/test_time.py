"""What is worked out once for many steps is worked out for each that differs in anything that it follows from."""

from dataclasses import fields, replace

import pytest

from atorch.cluster import ClusterSpec
from atorch.cost import Cost, Matmul, Region, Segment, StepTimes, step_time
from atorch.cost.splits import replicate

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
    "segments": (replace(BLOCK, num_ops=1000), HEAD), "axes": AXES | {"data": 2, "zero": 2}, "schedule": "gpipe",
    "dtype": "bfloat16", "recompute_keeps": "selective", "comm": (), "device_bytes": 1e9,
    "attention": "written", "fp8": "tensorwise", "attention_kernel": "flash3",
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
