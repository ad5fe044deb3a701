"""Collectives beside what others measured of them alone, and what arithmetic demands of them."""

import math
import statistics
from dataclasses import replace

import pytest

from atorch.cluster.spec import ClusterSpec
from atorch.cost.comm import LinkGroup, group_of

# GB/s of the bus for 256 MB on so many nodes of 8 H100s over EFA: Ultra-Scale Playbook (nanotron), pp_comm_bandwidth.
GATHERED_IN_2024 = {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}
REDUCED_IN_2024 = {2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9}
OF_2024 = {"inter_node.latency_s": 3.7e-5, "inter_node.efficiency": 0.73, "tree_efficiency": 0.19}
# GB/s, payload over time, by nodes of 8 H100s over EFA, of 32 MiB and twice as much each: data/nccl_all_gather.csv and
# nccl_all_reduce.csv in crazyguitar/aws-gpu-communication-benchmark at fd167f9.
GATHERED = {
    2: (140.1, 213.8, 250.2, 229.9, 293.9, 343.5, 350.5),
    4: (86.2, 143.4, 218.6, 261.5, 227.7, 297.8, 341.6),
    8: (47.0, 88.2, 145.9, 218.8, 265.4, 228.0, 298.4),
    16: (25.1, 47.4, 88.4, 145.2, 221.7, 263.9, 267.2),
    32: (12.4, 25.1, 45.8, 86.6, 147.0, 223.3, 263.8),
}
REDUCED = {
    2: (78.6, 110.4, 162.7, 194.4, 211.2, 232.1, 237.4, 248.4, 254.8),
    4: (49.2, 78.7, 118.4, 141.1, 143.7, 144.7, 179.4, 182.9, 184.2),
    8: (44.1, 52.8, 79.4, 117.9, 138.5, 139.4, 141.3, 178.4, 180.5),
    16: (37.7, 46.6, 65.1, 74.6, 112.8, 135.7, 136.5, 154.3, 179.5),
    32: (33.3, 42.0, 58.1, 69.3, 78.7, 110.5, 135.3, 152.0, 161.2),
}
RINGS = ("all_gather", "reduce_scatter")
KINDS = ("all_reduce", *RINGS, "all_to_all", "broadcast", "send")


def whole(name: str, nodes: int, overrides: dict[str, float] | None = None) -> LinkGroup:
    cluster = ClusterSpec.load(name, nodes, overrides=overrides)
    return group_of(("data",), {"data": cluster.world_size}, cluster)


def errors_over_efa(kind, nodes, rates):
    """Logarithms of what is estimated over what was measured, by size."""
    group = whole("p5.48xlarge", nodes)
    sizes = [2 ** (25 + place) for place in range(len(rates))]
    return [math.log(group.seconds(kind, 1, size) * rate * 1e9 / size) for size, rate in zip(sizes, rates, strict=True)]


@pytest.mark.parametrize(("nodes", "rates"), GATHERED.items())
def test_all_gathers_over_efa_by_nodes_and_size(nodes, rates):
    errors = errors_over_efa("all_gather", nodes, rates)
    assert max(map(abs, errors)) < 0.26
    assert statistics.mean(map(abs, errors)) < 0.14


@pytest.mark.parametrize(("nodes", "rates"), REDUCED.items())
def test_all_reduces_over_efa_by_nodes_and_size(nodes, rates):
    """Small ones go by trees: at a ring's rate these would take a third of what was measured."""
    errors = errors_over_efa("all_reduce", nodes, rates)
    assert max(map(abs, errors)) < 0.45
    assert statistics.mean(map(abs, errors)) < 0.3


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize(("nodes", "measured"), GATHERED_IN_2024.items())
def test_rings_over_efa_by_the_number_of_nodes(kind, nodes, measured):
    group = whole("p5.48xlarge", nodes, OF_2024)
    passed = 256e6 * (1 - 1 / group.size)
    assert passed / group.seconds(kind, 1, 256e6) == pytest.approx(measured * 1e9, rel=0.22)


@pytest.mark.parametrize(("nodes", "measured"), REDUCED_IN_2024.items())
def test_trees_over_efa_by_the_number_of_nodes(nodes, measured):
    """Two nodes are faster than by a ring, and 64 slower than any tree of so many."""
    group = whole("p5.48xlarge", nodes, OF_2024)
    passed = 2 * 256e6 * (1 - 1 / group.size)
    error = math.log(group.seconds("all_reduce", 1, 256e6) * measured * 1e9 / passed)
    assert abs(error) < (0.41 if nodes in (4, 8, 16, 32) else 0.75)


def test_a_ring_over_infiniband_on_256_devices():
    """200 GB/s of the bus for 2 GiB: NVIDIA/nccl issue 1218."""
    passed = 2**31 * 255 / 256
    assert passed / whole("h100_80g", 32).seconds("all_gather", 1, 2**31) == pytest.approx(200e9, rel=0.15)


def test_all_reduces_of_eight_a100s():
    """231 GB/s of the bus for 1 GiB, and 100 for 16 MiB: NVIDIA/nccl issue 527, PKU-DAIR/Hetu-Galvatron sp_time."""
    group = whole("a100_40g", 1)
    large, small = (1.75 * size / group.seconds("all_reduce", 1, size) for size in (2**30, 2**24))
    assert large == pytest.approx(231e9, rel=0.08)
    assert small < 0.75 * large, "smaller ones reach a fraction"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["p5.48xlarge", "a100_80g", "v100_16g", "rtx4090"])
def test_more_bytes_and_more_ranks_are_never_faster(kind, name):
    before = 0.0
    for nodes in (1, 2, 3, 8, 128):
        group = whole(name, nodes)
        of_a_rank = 1e6 if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1e6 / group.size
        seconds = [group.seconds(kind, 1, of_a_rank * group.size * more) for more in (0, 1, 2, 100)]
        assert seconds == sorted(seconds)
        assert seconds[0] >= 0
        assert seconds[1] >= before
        before = seconds[1]
        slower = replace(group, outer_latency_s=2 * group.outer_latency_s)
        assert slower.seconds(kind, 1, 1e6) >= group.seconds(kind, 1, 1e6)
