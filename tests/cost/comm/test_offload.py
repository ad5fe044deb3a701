"""What waits on the host: bytes and seconds against numbers worked by hand."""

import math
from dataclasses import replace

import pytest

from atorch.cluster.spec import ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from atorch.cost import Cost, Region, Segment, peak_memory
from atorch.cost.comm.offload import BYTES_A_CORE, UNHIDDEN, host_time, rates_of
from atorch.cost.memory import host_bytes, stage_memory, uses_host
from atorch.cost.pipeline_stages import stages_of

BLOCK = Segment(
    name="blocks.0", count=10, is_block=True, num_params=100, num_trainable=100, outside=Region(saved_bytes=50)
)
# 4,000 + 4,000 + 8,000 of states, 500 activations, all of them there at the loss.
PLAIN = Cost(segments=(BLOCK,), traced_batch=1.0, batch_size=1.0, grads_persist=True)
CLUSTER = ClusterSpec(
    device=DeviceSpec(type="cuda", name="toy", memory_bytes=1e6),
    intra_node=LinkSpec(bandwidth=1e4, latency_s=0.0),
    inter_node=LinkSpec(bandwidth=1e4, latency_s=0.0),
    host_link=LinkSpec(bandwidth=2e3, latency_s=0.0, efficiency=0.5),
)


def seconds(cost, computing_s=0.0):
    return host_time(cost, computing_s, CLUSTER).total_s


def test_nothing_waits_unasked():
    assert not uses_host(PLAIN)
    assert (host_bytes(PLAIN), seconds(PLAIN)) == (0, 0)


def test_shares_wait_on_the_host():
    cost = replace(PLAIN, param_offload=0.5, optim_offload=1.0, activation_offload=0.2)
    memory = peak_memory(cost)
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.activations) == (2000, 2000, 0, 400)
    # Half of the parameters and gradients, all states, and copies and gradients of what the host steps and lacks.
    assert memory.on_host == host_bytes(cost) == 4000 + 8000 + 4000 + 100
    assert "on_host" not in memory.by_category()


@pytest.mark.parametrize(
    ("budget", "stepped", "parameters"),
    [(16_500, 0, 4000), (10_500, 0.5, 4000), (4_500, 1, 4000), (2_500, 1, 2000), (400, 1, 0)],
)
def test_beyond_a_budget_states_and_gradients_make_way_first(budget, stepped, parameters):
    memory = peak_memory(replace(PLAIN, budget_bytes=float(budget)))
    assert memory.optimizer == pytest.approx(8000 * (1 - stepped))
    assert memory.gradients == pytest.approx(4000 * (1 - stepped))
    assert memory.parameters == pytest.approx(parameters)
    assert memory.on_host == pytest.approx(16_000 * stepped), "parameters that the host steps have a copy there"
    assert memory.total == pytest.approx(max(budget, 500))  # activations stay


STEPPED, FETCHED, AWAY = (
    {"optim_offload": 1.0},
    {"param_offload": 1.0, "optim_offload": 1.0},
    {"activation_offload": 1.0},
)
BUDGET = STEPPED | {"budget_bytes": 20_000.0}
SHARDS = FETCHED | {"param_shards": 4.0, "optim_shards": 4.0}
THRICE = {"num_micro_batches": 3.0, "batch_size": 3.0}
STEP = 24 + 4


@pytest.mark.parametrize(
    ("changes", "computing_s", "expected"),
    [
        # Gradients down, 4,000 at 1,000 B/s; the step reads and writes 4,000 + 8,000 and reads 4,000; parameters up.
        (STEPPED, 0.0, 4 + STEP + 4),
        (STEPPED, 9.0, 4 + STEP + 4),  # it waits for all gradients
        ({"optim_offload": 0.5}, 0.0, 18),
        # Under a budget gradients go down and parameters come up beside computing.
        (BUDGET, 0.0, 4 + 4 + STEP),
        # Behind one second of forward and two of backward, which hide all but a little of it.
        (BUDGET, 3.0, 3 + 2 + UNHIDDEN * (1 + 2) + STEP),
        (BUDGET, 12.0, UNHIDDEN * (4 + 4) + STEP),
        (BUDGET | {"num_micro_batches": 3.0}, 0.0, 4 + 3 * 4 + STEP),  # parameters stay
        (BUDGET | {"fetches_ahead": False}, 12.0, 4 + 4 + STEP),
        # Half of the parameters have no room, and are fetched again.
        ({"budget_bytes": 2_500.0}, 0.0, 4 + max(2, 4) + STEP),
        (THRICE | {"budget_bytes": 2_500.0}, 0.0, 4 + 2 * 2 + max(3 * 2, 3 * 4) + STEP),
        # Parameters are fetched for forward and backward of every micro-batch; nothing else goes up.
        (FETCHED, 0.0, 2 * 4 + STEP),
        (FETCHED | {"num_micro_batches": 3.0}, 0.0, 6 * 4 + STEP),
        (FETCHED | {"keeps_gathered": True}, 0.0, 4 + 4 + STEP),  # gradients come down alone
        # Activations go down and up once for each micro-batch.
        (AWAY, 0.0, 2 * 0.5),
        (AWAY | {"num_micro_batches": 5.0, "batch_size": 5.0}, 0.0, 2 * 2.5),
        # Backward's 0.6 hides the way up, but for a little.
        (AWAY, 0.9, 0.5 - 0.3 + UNHIDDEN * (0.3 + 0.5)),
        (AWAY, 1.5, UNHIDDEN * (0.5 + 0.5)),  # nothing hides wholly
        # Shards wait as shards, and go down with every micro-batch that reduces them.
        (SHARDS | {"grad_shards": 4.0}, 0.0, (2 * 4 + STEP) / 4),
        (SHARDS | THRICE | {"grad_shards": 4.0, "keeps_gathered": True}, 0.0, (3 * 4 + 3 * 4 + STEP) / 4),
        ({"budget_bytes": 20_000.0}, 0.0, 0),  # which is never reached
    ],
)
def test_seconds_by_hand(changes, computing_s, expected):
    assert seconds(replace(PLAIN, **changes), computing_s) == pytest.approx(expected)


def test_what_is_stepped_in_backward_hides_behind_it():
    cost = replace(PLAIN, optim_offload=1.0, budget_bytes=20_000.0, fetches_ahead=False)
    early = replace(cost, steps_in_backward=True)
    step, backward = 24 + 4, 24.0
    assert seconds(cost, computing_s=36.0) - seconds(early, computing_s=36.0) == pytest.approx(
        step - (step - backward) - UNHIDDEN * backward
    )
    assert seconds(early) == seconds(cost), "where backward takes no time nothing hides"


def test_masters_have_gradients_of_their_own_while_the_host_steps():
    cost = replace(PLAIN, optim_offload=1.0, param_itemsize=2.0, grad_itemsize=2.0, master_itemsize=4.0)
    assert host_bytes(cost) == 1000 * (4 + 8 + 4 + 2 + 2)
    assert host_bytes(replace(cost, param_offload=1.0)) == 1000 * (4 + 8 + 4 + 2 + 2)


def test_activations_outside_of_blocks_stay():
    head = Segment(name="head", num_params=0, num_trainable=0, outside=Region(saved_bytes=300))
    cost = replace(PLAIN, segments=(BLOCK, head), activation_offload=1.0)
    memory = peak_memory(cost)
    assert (memory.activations, memory.on_host) == (300, 500)
    assert seconds(cost) == pytest.approx(2 * 0.5)


def test_shards_wait_as_shards_and_a_budget_may_ask_for_the_host():
    assert host_bytes(replace(PLAIN, **SHARDS, grad_shards=4.0)) == 4000
    assert uses_host(replace(PLAIN, budget_bytes=20_000.0))
    assert not uses_host(replace(PLAIN, budget_bytes=math.inf))


def test_whole_gradients_stay_until_they_are_reduced_and_this_devices_shard_goes_down():
    cost = replace(PLAIN, **SHARDS, gathered_itemsize=4.0, grads_persist=False, whole_grads=True)
    cost = replace(cost, num_micro_batches=2.0, batch_size=2.0)
    assert peak_memory(cost).gradients == 4000
    assert host_bytes(cost) == 16_000 / 4
    assert seconds(cost) == pytest.approx((4 * 4 + 24 + 4) / 4)
    assert seconds(cost, computing_s=100.0) == pytest.approx((24 + 4) / 4 + UNHIDDEN * (2 * 4 + 2 * 4) / 4)


def test_of_several_micro_batches_in_flight_one_is_back_ahead():
    cost = replace(PLAIN, grads_persist=False, stages=10, num_micro_batches=10.0, batch_size=10.0)
    cost = replace(cost, activation_offload=1.0, activations_ahead=1.0)
    for stage in stages_of(cost):
        assert stage_memory(cost, stage).activations <= stage.in_flight * 50


NODE = replace(CLUSTER, devices_per_node=8, host=HostSpec(memory_bandwidth=1e4, cores=64, devices_per_uplink=2))


def test_devices_share_what_a_node_has_once():
    alone, all_of_them = rates_of(replace(NODE, devices_per_node=1)), rates_of(NODE)
    assert alone.one_way == 1e3, "its own link"
    assert alone.both_ways == pytest.approx(1.42e3)
    assert all_of_them.one_way == pytest.approx(1e3 / 2), "two behind one switch"
    assert all_of_them.both_ways == pytest.approx(1.42e3 / 2)
    slow = rates_of(replace(NODE, host=replace(NODE.host, memory_bandwidth=2e3)))
    assert slow == pytest.approx((200, 200, 200)), "0.8 × 2,000 bytes/s for eight devices"
    weak = rates_of(replace(NODE, host=replace(NODE.host, memory_bandwidth=1e15, cores=1)))
    assert weak.step == pytest.approx(BYTES_A_CORE / 8)


@pytest.mark.parametrize("name", ["h100_80g", "a100_80g", "v100_16g", "rtx4090", "b200"])
def test_a_nodes_devices_together_have_no_more_than_the_node(name):
    cluster = ClusterSpec.load(name)
    rates, host = rates_of(cluster), cluster.host
    switches = cluster.devices_per_node / host.devices_per_uplink
    assert cluster.devices_per_node * rates.one_way <= switches * cluster.host_link.bandwidth
    assert cluster.devices_per_node * rates.both_ways <= host.memory_bandwidth
    assert cluster.devices_per_node * rates.step <= min(host.memory_bandwidth, BYTES_A_CORE * host.cores)


@pytest.mark.parametrize("moved", [{"optim_offload": 1.0}, {"activation_offload": 1.0}, {"budget_bytes": 5e3}])
def test_eight_devices_that_offload_are_never_faster_than_one(moved):
    cost, before = replace(PLAIN, **moved), 0.0
    for devices in (1, 2, 4, 8):
        node = replace(NODE, devices_per_node=devices)
        now = host_time(cost, 1.0, node).total_s
        assert now >= before
        before = now
    assert before > host_time(cost, 1.0, replace(NODE, devices_per_node=1)).total_s


def test_what_goes_to_other_nodes_takes_the_same_link():
    cost = replace(PLAIN, activation_offload=1.0)
    quiet = host_time(cost, 0.9, CLUSTER).total_s
    busy = host_time(cost, 0.9, CLUSTER, between_s=0.3).total_s  # 0.6 s are left, 0.2 for forward
    assert quiet == pytest.approx(0.2 + UNHIDDEN * 0.8)
    assert busy == pytest.approx(0.3 + 0.1 + UNHIDDEN * 0.6)
    assert host_time(cost, 0.9, CLUSTER, between_s=2.0).total_s == pytest.approx(1.0)
