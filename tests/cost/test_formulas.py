"""The arithmetic of costs against numbers worked by hand."""

from dataclasses import replace

import pytest

from atorch.cluster import ClusterSpec, DeviceSpec, LinkSpec
from atorch.cost import BlockProfile, Comm, ModelProfile, peak_bytes, peak_memory, plain_cost, step_time
from atorch.cost.collectives import collective_seconds

PROFILE = ModelProfile(
    num_params=1000, num_trainable=500, param_bytes=4000, trainable_bytes=2000, buffer_bytes=40, batch_size=2,
    matmul_flops=6e3, attention_flops=1e3, traffic_bytes=3e3, num_ops=10, activation_bytes=800, output_bytes=16,
    working_bytes=64,
    blocks=tuple(
        BlockProfile(
            name=f"b{i}", num_params=300, param_bytes=1200, forward_flops=2e3, activation_bytes=300, input_bytes=20
        )
        for i in range(2)
    ),
    optim_state_per_param=2.0, module_classes=frozenset({"Linear"}),
)  # fmt: skip
CLUSTER = ClusterSpec(
    device=DeviceSpec(
        type="cpu", name="toy", memory_bytes=1e6, peak_flops={"float32": 1e6, "bfloat16": 4e6},
        matmul_efficiency=0.5, memory_bandwidth=1e5, launch_s=1e-3,
    ),
    devices_per_node=4,
    intra_node=LinkSpec(bandwidth=1e4, latency_s=1e-2),
    inter_node=LinkSpec(bandwidth=1e3, latency_s=1e-1),
)  # fmt: skip


def test_plain_cost_by_hand():
    cost = plain_cost(PROFILE, batch_size=4)  # twice what was traced
    assert cost.matmul_flops == 2 * 6e3 * 2.5  # half of the weights are frozen
    assert cost.attention_flops == 2 * 1e3 * 3.5
    assert cost.traffic_bytes == 2 * 3e3 * 3
    assert cost.num_ops == 30
    assert cost.activation_bytes == 1600
    assert cost.block_activation_bytes == 1200
    assert cost.boundary_bytes == 80
    assert cost.working_bytes == 256
    assert cost.block_flop_fraction == pytest.approx(4 / 7)
    assert cost.grad_bytes == 2000
    assert cost.optim_bytes == 4000
    assert cost.optim_traffic_bytes == 3 * 2000 + 2 * 4000
    assert cost.batch_size == 4


def test_peak_memory_by_hand():
    memory = peak_memory(plain_cost(PROFILE))
    assert memory.by_category() == {
        "parameters": 4000, "optimizer": 4000, "gradients": 2000, "activations": 800, "working": 128, "buffers": 40,
    }  # fmt: skip
    assert memory.total == 10968
    assert peak_bytes(replace(plain_cost(PROFILE), activation_scale=0.5)) == 10568


def test_step_time_by_hand():
    time = step_time(plain_cost(PROFILE), CLUSTER)
    assert time.matmul_s == pytest.approx((15e3 + 3.5e3) / 0.5e6)
    assert time.traffic_s == pytest.approx(9e3 / 1e5)
    assert time.launch_s == pytest.approx(0.03)
    assert time.optimizer_s == pytest.approx(14e3 / 1e5)
    assert time.exposed_comm_s == 0
    assert time.total_s == pytest.approx(0.037 + 0.09 + 0.03 + 0.14)


def test_a_gpu_hides_launches_behind_work():
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, type="cuda"))
    assert step_time(plain_cost(PROFILE), cluster).total_s == pytest.approx(0.037 + 0.09 + 0.14)


def test_low_precision_runs_at_its_own_peak():
    cost = replace(plain_cost(PROFILE), dtype="bfloat16")
    assert step_time(cost, CLUSTER).matmul_s == pytest.approx(18.5e3 / 2e6)


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
    comm = Comm(kind, ("data",), num_bytes=100, count=3)
    assert collective_seconds(comm, 4, 1e4, 1e-2) == pytest.approx(seconds)


def test_communication_hides_behind_backward_at_most():
    cost = replace(plain_cost(PROFILE), axes={"data": 4}).send(Comm("all_reduce", ("data",), 1000, overlap=0.8))
    seconds = 6 * 1e-2 + 1.5 * 1000 / 1e4
    computing = 0.037 + 0.09 + 0.03
    time = step_time(cost, CLUSTER)
    assert time.exposed_comm_s == pytest.approx(0.2 * seconds + max(0, 0.8 * seconds - computing * 2 / 3))


def test_groups_beyond_a_node_use_the_slow_link():
    cost = replace(plain_cost(PROFILE), axes={"data": 8}).send(Comm("all_gather", ("data",), 1000))
    assert step_time(cost, CLUSTER).exposed_comm_s == pytest.approx(7 * 1e-1 + 7 / 8 * 1000 / 1e3)


def test_axes_of_one_rank_carry_nothing():
    cost = replace(plain_cost(PROFILE), axes={"data": 1}).send(Comm("all_gather", ("data",), 1000))
    assert cost.comm == ()
