"""The arithmetic of costs against numbers worked by hand."""

from dataclasses import replace

import pytest

from atorch.cluster.spec import ClusterSpec, DeviceSpec, Efficiency, LinkSpec
from atorch.cost import Comm, Matmul, ModelProfile, Region, Segment, peak_bytes, peak_memory, plain_cost, step_time
from atorch.cost.comm import LinkGroup
from atorch.cost.memory import SLACK
from atorch.cost.time import SHARPNESS

ENDS = Segment(
    name="", num_params=400, num_trainable=200, matmuls=(Matmul(rows=2, inner=50, columns=10),), num_ops=4,
    outside=Region(saved_bytes=200, traffic_bytes=1e3), working_bytes=128,
)  # fmt: skip
BLOCK = Segment(
    name="blocks.0", count=2, is_block=True, num_params=300, num_trainable=150, num_ops=3,
    matmuls=(Matmul(rows=2, inner=50, columns=20, split="columns"),), attention_flops=500.0, input_bytes=20,
    outside=Region(saved_bytes=100, selective_bytes=30, traffic_bytes=600),
    inside=Region(saved_bytes=200, selective_bytes=50, traffic_bytes=400),
)  # fmt: skip
PROFILE = ModelProfile(
    segments=(ENDS, BLOCK), num_params=1000, num_trainable=500, param_bytes=4000, trainable_bytes=2000, buffer_bytes=40,
    batch_size=2, optim_state_per_param=2.0, block_classes=frozenset({"Linear"}),
)  # fmt: skip
CLUSTER = ClusterSpec(
    device=DeviceSpec(
        type="cpu", name="toy", memory_bytes=1e6, peak_flops={"float32": 1e6, "bfloat16": 4e6},
        efficiency=Efficiency(matmul=0.5, attention=0.5, traffic=1.0), memory_bandwidth=1e5, launch_s=1e-3,
    ),
    devices_per_node=4,
    intra_node=LinkSpec(bandwidth=1e4, latency_s=1e-2),
    inter_node=LinkSpec(bandwidth=1e3, latency_s=1e-1),
)  # fmt: skip


# Forward of two samples: products 2·2·50·10 + 2·(2·2·50·20) = 2,000 + 8,000; attention 1,000; traffic 3,000; ops 10.
# Three passes move the operands and results, 4·(2·50 + 50·10 + 2·10) = 2,480 and 4·(2·50 + 50·20 + 2·20) = 4,560 bytes,
# which takes longer than to multiply them.
ATTENTION_S = 3.5 * 500 / 0.5e6
BLOCK_S = 3 * max(4e3 / 0.5e6, 4560 / 1e5) + ATTENTION_S
MATMUL_S = 3 * max(2e3 / 0.5e6, 2480 / 1e5) + 2 * BLOCK_S
TRAFFIC_S, LAUNCH_S = 2.5 * 3e3 / 1e5, 30 * 1e-3
OPTIMIZER_S = 500 * (2 * (4 + 8) + 4) / 1e5


def test_a_fold_starts_from_the_model_as_it_is():
    cost = plain_cost(PROFILE)
    assert (cost.param_itemsize, cost.grad_itemsize, cost.optim_itemsize, cost.buffer_bytes) == (4, 4, 8, 40)
    assert (cost.traced_batch, cost.batch_size, plain_cost(PROFILE, 6).batch_size) == (2, 2, 6)
    dtypes = [plain_cost(replace(PROFILE, param_bytes=size)).dtype for size in (4000, 2000, 3000)]
    assert dtypes == ["float32", "bfloat16", "float32"]
    assert plain_cost(replace(PROFILE, num_trainable=0, trainable_bytes=0)).grad_itemsize == 4, "nothing to train"


# The peak is at the loss, when all activations are there, where gradients persist and the optimizer needs no room.
PERSISTENT = replace(plain_cost(PROFILE), grads_persist=True, step_itemsize=0.0)


def test_peak_memory_by_hand():
    memory = peak_memory(PERSISTENT)
    assert memory.by_category() == {
        "parameters": 4000, "optimizer": 4000, "gradients": 2000, "activations": 800, "working": 128, "buffers": 40,
        "slack": SLACK * 928,
    }  # fmt: skip
    assert memory.total == 10968
    assert memory.reserved == 10968 + SLACK * 928
    assert peak_bytes(replace(PERSISTENT, activation_scale=0.5)) == 10504
    assert peak_memory(replace(PERSISTENT, batch_size=4.0)).activations == 1600


def test_gradients_come_as_activations_go():
    few = peak_memory(plain_cost(PROFILE))
    assert (few.gradients, few.activations, few.transient) == (2000, 0, 2000)  # when the optimizer steps
    few = peak_memory(replace(plain_cost(PROFILE), step_itemsize=0.0))
    assert (few.gradients, few.activations, few.working) == (2000, 0, 128)  # when what comes first goes backward
    many = peak_memory(plain_cost(PROFILE, batch_size=200))
    assert (many.gradients, many.activations, many.working) == (0, 80_000, 12_800)  # at the loss
    # Where parameters outweigh activations, when the first block goes backward and the others' gradients are there.
    deep = replace(
        PERSISTENT, grads_persist=False, segments=(replace(BLOCK, count=3, num_params=3000, num_trainable=3000),)
    )
    last = peak_memory(replace(deep, batch_size=20.0))
    assert (last.gradients, last.activations) == (3 * 12_000, 3000)


def test_a_tensor_split_divides_the_inside_and_norms_where_they_are_split_too():
    split = replace(PERSISTENT, tensor=2)
    assert peak_memory(split).activations == 200 + 2 * (100 + 200 / 2)
    assert peak_memory(replace(split, splits_norms=True)).activations == 200 / 2 + 2 * (100 + 200) / 2
    moved = 3 * (2480 + 2 * 4 * (2 * 50 + 50 * 10 + 2 * 10)) / 1e5
    assert step_time(split, CLUSTER).matmul_s == pytest.approx(2 * ATTENTION_S / 2 + moved)


@pytest.mark.parametrize(("keeps", "kept"), [("inputs", 20), ("selective", 80), ("nothing", 0)])
def test_recomputation_keeps_little_and_runs_forward_again(keeps, kept):
    cost = replace(PERSISTENT, recompute=1.0, recompute_keeps=keeps)
    memory = peak_memory(cost)
    assert memory.activations == 200 + 2 * kept
    assert memory.working == 300 - kept  # the rest of one block while it runs again


def test_a_pipeline_holds_stages_and_micro_batches_in_flight():
    cost = replace(PERSISTENT, batch_size=8.0, stages=2, num_micro_batches=4.0)
    first = peak_memory(cost)
    assert first.stage == 0
    assert first.parameters == 4 * (400 + 300)
    assert first.activations == 2 * (200 + 300)  # two micro-batches of two samples
    gpipe = peak_memory(replace(cost, schedule="gpipe"))
    assert gpipe.activations == 4 * (200 + 300)
    time = step_time(cost, CLUSTER)
    # Three of four micro-batches add to gradients that are there, and the first one's are copied to their place.
    accumulated = 150 * 4 * (3 * 3 / 4 + 2 / 4) / 1e5
    second = BLOCK_S + 2.5 * 1e3 / 1e5 + (9 + 240) * 1e-3 + accumulated
    sent = 1e-2 + 20 / 1e4
    assert time.bubble_s == pytest.approx(second + 2 * sent)  # the first stage waits for the other's micro-batch
    assert time.exposed_comm_s == pytest.approx(2 * 3 * sent)


def test_step_time_by_hand():
    time = step_time(plain_cost(PROFILE), CLUSTER)
    assert time.matmul_s == pytest.approx(MATMUL_S)
    assert time.traffic_s == pytest.approx(TRAFFIC_S)
    assert time.launch_s == pytest.approx(LAUNCH_S)
    assert time.optimizer_s == pytest.approx(OPTIMIZER_S)
    assert time.exposed_comm_s == time.bubble_s == 0
    assert time.total_s == pytest.approx(MATMUL_S + TRAFFIC_S + LAUNCH_S + OPTIMIZER_S)


def test_a_gpu_hides_launches_behind_work():
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, type="cuda"))
    working = MATMUL_S + TRAFFIC_S
    knee = (working**SHARPNESS + LAUNCH_S**SHARPNESS) ** (1 / SHARPNESS)
    assert working < knee < working + 0.1 * LAUNCH_S
    assert step_time(plain_cost(PROFILE), cluster).total_s == pytest.approx(knee + OPTIMIZER_S)


def test_low_precision_runs_at_its_own_peak():
    cost = replace(plain_cost(PROFILE), dtype="bfloat16")
    moved = 3 * (2480 + 2 * 4560) / 1e5
    assert step_time(cost, CLUSTER).matmul_s == pytest.approx(2 * ATTENTION_S / 4 + moved / 2)


def test_the_longer_of_multiplying_and_moving_counts():
    wide = replace(CLUSTER, device=replace(CLUSTER.device, memory_bandwidth=1e9))
    assert step_time(plain_cost(PROFILE), wide).matmul_s == pytest.approx(3 * 1e4 / 0.5e6 + 2 * ATTENTION_S)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_reduce", 3 * 6 * 1e-2 + 1.5 * 100 / 1e4),
        ("all_gather", 3 * 3 * 1e-2 + 0.75 * 100 / 1e4),
        ("reduce_scatter", 3 * 3 * 1e-2 + 0.75 * 100 / 1e4),
        ("send", 3 * 1e-2 + 100 / 1e4),
    ],
)
def test_collectives_by_hand(kind, seconds):
    group = LinkGroup(size=4, num_nodes=1, bandwidth=1e4, inner_latency_s=1e-2, outer_latency_s=1e-1)
    assert group.seconds(kind, count=3, num_bytes=100) == pytest.approx(seconds)


def test_communication_hides_behind_backward_at_most():
    cost = replace(plain_cost(PROFILE), axes={"data": 4}).send(Comm("all_reduce", ("data",), 1000, overlap=0.8))
    seconds = 6 * 1e-2 + 1.5 * 1000 / 1e4
    computing = MATMUL_S + TRAFFIC_S + LAUNCH_S
    time = step_time(cost, CLUSTER)
    assert time.exposed_comm_s == pytest.approx(0.2 * seconds + max(0, 0.8 * seconds - computing * 2 / 3))


def test_axes_of_one_rank_carry_nothing():
    cost = replace(plain_cost(PROFILE), axes={"data": 1}).send(Comm("all_gather", ("data",), 1000))
    assert cost.comm == ()
