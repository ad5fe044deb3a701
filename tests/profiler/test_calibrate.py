"""What is measured becomes figures of a cluster, each with its source; lines go through points that lie on one."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from atorch.cluster.microbenchmark import MATMUL_DTYPES
from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.distributed.world import World
from atorch.profiler import calibrate as calibration
from atorch.profiler.calibrate import Line, Products, calibrate

CPU = torch.device("cpu")


def test_timings_go_from_small_to_large_within_a_budget():
    found = calibration.products(torch.float32, CPU, 0.2)
    flops = [m * k * n for m, k, n in found]
    assert flops == sorted(flops)
    assert len(flops) > 4
    assert all(seconds > 0 for seconds in found.values())

    calls = []

    def make(name):
        calls.append(name)
        return lambda: None

    some = calibration._growing({"big": 1e18, "small": 1.0}, make, CPU, 1e-3)
    assert list(some) == calls == ["small"]

    found = calibration.attentions(torch.float32, CPU, 0.1)
    assert {(batch, head_dim) for batch, _, _, head_dim in found} == {(1, 64)}


def _collectives(rank, size):
    return calibration.collectives(dist.group.WORLD, CPU, 0.2)


def test_all_processes_time_the_same_collectives(pool):
    first, *others = pool.run(_collectives, ranks=3)
    assert {kind for kind, _ in first} == {"all_reduce", "all_gather"}
    assert all(num_bytes % (4 * 3) == 0 for _, num_bytes in first)
    assert all(other.keys() == first.keys() for other in others)


@pytest.mark.gpu
def test_copies_to_and_from_the_host():
    found = calibration.host_copies(torch.device("cuda"), 0.5)
    assert {way for way, _ in found} == {"to device", "to host"}


CPU = torch.device("cpu")
SHAPES = [(n, n, n) for n in (64, 256, 1024, 4096)]


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e15))
def test_a_line_goes_through_its_points(start_s, rate):
    knee = start_s * rate  # where half of the time is the start
    points = [(1.0, work, start_s + work / rate) for work in (knee / 10, knee / 2, knee, 5 * knee, 100 * knee)]
    line = Line.through(points)
    assert (line.start_s, line.rate) == pytest.approx((start_s, rate), rel=1e-3)
    assert line.error < 1e-3


def test_lines_and_curves_of_products():
    falling = Line.through([(1.0, 1e6, 2.0), (1.0, 2e6, 1.0)])
    assert falling.rate == 2e6  # the best that was seen
    assert falling.start_s > 0
    steeper = Line.through([(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)])
    assert steeper.start_s == 0

    rates, start_s = {"float32": 1e12, "bfloat16": 8e12}, 5e-6
    found = Products.through(
        {dtype: {(m, k, n): start_s + 2 * m * k * n / rate for m, k, n in SHAPES} for dtype, rate in rates.items()}
    )
    assert found.rates == pytest.approx(rates)
    assert found.half_flops == pytest.approx(start_s * 8e12)
    assert found.error < 1e-6


def measuring(monkeypatch, share, rate):
    """Timings as of a device that reaches `share` of an H100's peaks, after 4 µs each, and links of `rate` bytes/s."""
    peaks = ClusterSpec.load("h100_80g").device.peak_flops
    dtypes = {getattr(torch, dtype): peaks[dtype] for dtype in MATMUL_DTYPES}

    monkeypatch.setattr(
        calibration, "products",
        lambda dtype, place, budget: {(m, k, n): 4e-6 + 2 * m * k * n / (share * dtypes[dtype]) for m, k, n in SHAPES},
    )  # fmt: skip
    monkeypatch.setattr(
        calibration, "attentions",
        lambda dtype, place, budget: {(1, 2, 4096, 64): 3.5 * 4 * 2 * 4096**2 * 64 / (0.4 * dtypes[dtype])},
    )  # fmt: skip
    sizes = [10.0**power for power in range(3, 9)]
    copies = {("to device", size): 1e-5 + size / rate for size in sizes}
    copies |= {("to host", size): 1e-5 + size / (2 * rate) for size in sizes}
    monkeypatch.setattr(calibration, "host_copies", lambda place, budget: copies)
    monkeypatch.setattr(calibration, "copy_bandwidth", lambda place: 0.9 * 3.35e12)
    monkeypatch.setattr(calibration, "launch_seconds", lambda place: 6e-6)


def test_a_described_device_keeps_its_peaks_and_learns_its_shares(monkeypatch):
    measuring(monkeypatch, share=0.7, rate=5e10)
    spec = ClusterSpec.load("h100_80g")
    monkeypatch.setattr(calibration, "undescribed", lambda world: replace(spec, num_nodes=1, devices_per_node=1))
    cluster = calibrate(World(rank=0, size=1, local_rank=0, device=torch.device("cuda")))
    assert cluster.device.peak_flops == spec.device.peak_flops
    assert cluster.device.efficiency.matmul == pytest.approx(0.7)
    assert cluster.device.efficiency.matmul_half_flops == pytest.approx(4e-6 * 0.7 * spec.device.peak_flops["bfloat16"])
    assert cluster.device.efficiency.attention == pytest.approx(0.4)
    assert not cluster.device.attention  # published shares of kernels, which were not measured here
    assert cluster.device.multiprocessors == 132
    assert cluster.device.efficiency.traffic == pytest.approx(0.9)
    assert cluster.device.launch_s == 6e-6
    assert cluster.host_link.bandwidth == spec.host_link.bandwidth
    assert cluster.host_link.efficiency == pytest.approx(5e10 / 6.3e10)  # of the slower way
    assert cluster.intra_node == spec.intra_node  # one process has nothing to measure it with
    measured = {place for place in cluster.to_json_data()["sources"] if cluster.source_of(place).startswith("measured")}
    assert {"device.efficiency.matmul", "device.launch_s", "host_link.efficiency"} <= measured
    assert not {"device.peak_flops", "intra_node.bandwidth", "host_link.bandwidth"} & measured
    assert ClusterSpec.of_json_data(cluster.to_json_data()) == cluster


def test_a_link_faster_than_its_data_sheet_is_believed(monkeypatch):
    measuring(monkeypatch, share=0.7, rate=1e11)
    given_link = LinkSpec(bandwidth=6.3e10, latency_s=1e-5, efficiency=0.8)
    device = DeviceSpec(type="cuda", name="gpu", memory_bytes=1e9)
    link, notes = calibration._host_link(given_link, True, device, torch.device("cuda"), 1.0)
    assert link == LinkSpec(bandwidth=pytest.approx(1e11), latency_s=pytest.approx(1e-5), efficiency=1.0)
    assert list(notes) == ["host_link"]


def test_groups_cross_one_kind_of_link_and_the_slowest_process_counts(monkeypatch):
    link = LinkSpec(bandwidth=1e9, latency_s=1e-5)
    device = DeviceSpec(type="cpu", name="cpu", memory_bytes=1e9)
    cluster = ClusterSpec(device=device, num_nodes=2, devices_per_node=3, intra_node=link, inter_node=link)
    assert calibration._groups(cluster) == {
        "intra_node": [[0, 1, 2], [3, 4, 5]],
        "inter_node": [[0, 3], [1, 4], [2, 5]],
    }
    assert calibration._groups(replace(cluster, num_nodes=1)) == {"intra_node": [[0, 1, 2]]}

    everywhere = [{"a": 1.0, "b": 2.0, "c": 1.0}, {"a": 3.0, "b": 1.0}]
    monkeypatch.setattr(calibration, "gather_objects", lambda mine: everywhere)
    assert calibration._slowest(everywhere[0]) == {"a": 3.0, "b": 2.0}


def leaves(data, above=""):
    for key, value in data.items():
        if isinstance(value, dict) and key != "sources":
            yield from leaves(value, f"{above}{key}.")
        elif key != "sources":
            yield above + key


def _calibrated(rank, size):
    torch.set_num_threads(1)
    cluster = calibrate(World(rank=rank, size=size, local_rank=rank, device=CPU), budget_s=0.5)
    return cluster.to_json_data()


def test_processes_measure_together_and_agree(pool):
    first, second = pool.run(_calibrated, ranks=2)
    assert first == second
    cluster = ClusterSpec.of_json_data(first)
    assert set(cluster.device.peak_flops) == set(MATMUL_DTYPES)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 1)  # no launcher says that they share one
    named = ("inter_node", "host_link", "device.peak_flops", "device.efficiency.attention")
    assert all(cluster.source_of(place).startswith("measured by atorch calibrate on ") for place in named)
    figures = [place for place in leaves(first) if place not in ("device.type", "device.name")]
    assert [place for place in figures if not cluster.source_of(place)] == []


def test_processes_of_one_node_stand_for_links_between_nodes(monkeypatch):
    link = LinkSpec(bandwidth=1e9, latency_s=1e-5)
    device = DeviceSpec(type="cpu", name="cpu", memory_bytes=1e9)
    cluster = ClusterSpec(device=device, devices_per_node=2, intra_node=link, inter_node=link)
    monkeypatch.setattr(calibration, "is_distributed", lambda: True)
    monkeypatch.setattr(calibration.dist, "new_subgroups_by_enumeration", lambda members: (members, []))
    monkeypatch.setattr(calibration.dist, "destroy_process_group", lambda group: None)
    # An all-reduce of two takes 2 hops and carries its bytes once; an all-gather half of both.
    found = {("all_reduce", size): 2e-4 + size / 2e9 for size in (1e3, 1e6)}
    found |= {("all_gather", size): 1e-4 + size / 2 / 2e9 for size in (1e3, 1e6)}
    monkeypatch.setattr(calibration, "collectives", lambda group, place, budget: found)
    links, notes = calibration._links(cluster, False, World(rank=0, size=2, local_rank=0, device=CPU), 1.0)
    assert links["intra_node"] == LinkSpec(bandwidth=pytest.approx(2e9), latency_s=pytest.approx(1e-4))
    assert links["inter_node"] == links["intra_node"]
    assert "an assumption" in notes["inter_node"]
    links, _ = calibration._links(cluster, True, World(rank=0, size=2, local_rank=0, device=CPU), 1.0)
    assert list(links) == ["intra_node"]  # what a data sheet says of the other is better than that


def test_one_process_says_what_it_did_not_measure():
    cluster = calibrate(World(rank=0, size=1, local_rank=0, device=CPU), budget_s=0.5)
    assert "Start several processes with torchrun" in cluster.source_of("intra_node.bandwidth")
    assert cluster.device.efficiency.attention <= 1.0
    assert ClusterSpec.of_json_data(cluster.to_json_data()) == cluster


@pytest.mark.gpu
def test_a_gpu_reaches_a_share_of_its_peaks():
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cuda", 0))
    cluster = calibrate(world, budget_s=10.0)
    assert 0.2 < cluster.device.efficiency.matmul <= 1.0
    assert 1e6 < cluster.device.efficiency.matmul_half_flops < 1e12
    assert 0.2 < cluster.device.efficiency.traffic <= 1.0
    assert 1e9 < cluster.host_link.bandwidth * cluster.host_link.efficiency < 1e12
    assert ClusterSpec.of_json_data(cluster.to_json_data()) == cluster
