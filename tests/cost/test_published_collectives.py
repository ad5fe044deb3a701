"""Collectives beside what others measured of them alone, and what arithmetic demands of them."""

from dataclasses import replace

import pytest

from atorch.cluster import ClusterSpec
from atorch.cost.collectives import Group, group_of

# GB/s of the bus for 256 MB on so many nodes of 8 H100s over EFA: Ultra-Scale Playbook (nanotron), pp_comm_bandwidth.
GATHERED = {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0}
RINGS = ("all_gather", "reduce_scatter")
KINDS = ("all_reduce", *RINGS, "all_to_all", "broadcast", "send")


def whole(name: str, nodes: int) -> Group:
    cluster = ClusterSpec.load(name, nodes)
    return group_of(("data",), {"data": cluster.world_size}, cluster)


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize(("nodes", "measured"), GATHERED.items())
def test_rings_over_efa_by_the_number_of_nodes(kind, nodes, measured):
    group = whole("p5.48xlarge", nodes)
    passed = 256e6 * (1 - 1 / group.size)
    assert passed / group.seconds(kind, 1, 256e6) == pytest.approx(measured * 1e9, rel=0.22)


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
