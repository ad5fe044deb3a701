"""Clusters are values: equal, hashable and written as they are read. Detection measures what no file describes."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch.cluster.microbenchmark import MATMUL_DTYPES, copy_bandwidth, measured, measured_link
from atorch.cluster.spec import ClusterSpec, DeviceSpec, Efficiency
from atorch.distributed.world import World
from atorch.errors import ArgumentError

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def test_equal_figures_are_one_key_whatever_their_sources():
    cluster = ClusterSpec.load("8x8xH100-80GB")
    same = replace(cluster, device=replace(cluster.device, peak_flops=dict(cluster.device.peak_flops)), sources={})
    other = replace(cluster, device=replace(cluster.device, peak_flops={"float32": 1e12}))
    assert {cluster: "kept"}[same] == "kept"
    assert other != cluster


@given(st.floats(1e3, 1e18), st.floats(1e3, 1e15), st.floats(0.01, 1.0))
def test_a_product_of_half_flops_reaches_half_of_the_share(flops, half, share):
    curve = Efficiency(matmul=share, matmul_half_flops=half)
    assert curve.matmul_share(half) == pytest.approx(share / 2)
    assert 0 < curve.matmul_share(flops) <= share
    start_s = half / share  # of a peak of 1 FLOP/s: seconds are linear in FLOPs
    assert flops / curve.matmul_share(flops) == pytest.approx(start_s + flops / share)


def test_what_is_saved_is_loaded(tmp_path):
    cluster = ClusterSpec.load("4x8xA100-80GB", overrides={"inter_node.bandwidth": 12.5e9})
    cluster.save(tmp_path / "mine.json")
    again = ClusterSpec.load(tmp_path / "mine.json")
    assert again == cluster
    assert again.sources == cluster.sources
    with pytest.raises(ArgumentError, match="cannot be written"):
        cluster.save(tmp_path / "nowhere" / "mine.json")


def test_a_source_stands_for_all_below():
    cluster = ClusterSpec.load("h100_80g")
    assert "whitepaper" in cluster.source_of("device.peak_flops.bfloat16")
    assert "published runs" in cluster.source_of("device.efficiency.traffic")
    assert "flash-attention" in cluster.source_of("device.attention.flash3.forward")
    assert cluster.source_of("device.name") == ""


def test_detecting_a_cpu_measures_it():
    cluster = ClusterSpec.detect(ALONE)
    assert cluster.world_size == 1
    assert set(cluster.device.peak_flops) == set(MATMUL_DTYPES)
    assert all(flops > 1e6 for flops in cluster.device.peak_flops.values())
    assert cluster.device.efficiency.matmul_share(1.0) == 1.0  # what was measured is what is reached
    assert 2**20 < cluster.device.memory_bytes < cluster.host_memory_bytes
    assert not ClusterSpec.detect(ALONE, measure=False).device.peak_flops


def test_what_was_detected_is_plain_data():
    cluster = ClusterSpec.detect(ALONE)
    assert ClusterSpec.of_json_data(json.loads(json.dumps(cluster.to_json_data()))) == cluster


def test_a_copy_counts_what_is_read_and_written(monkeypatch):
    monkeypatch.setattr("atorch.cluster.microbenchmark.seconds", lambda work, place: 0.5)
    assert copy_bandwidth(ALONE.device) == 2 * 4 * 2**23 / 0.5


def test_measuring_draws_no_random_number():
    before = torch.get_rng_state()
    measured(DeviceSpec(type="cpu", name="cpu", memory_bytes=1e9), ALONE.device)
    assert torch.equal(torch.get_rng_state(), before)


def _link(rank, size):
    return measured_link(World(rank=rank, size=size, local_rank=rank, device=ALONE.device))


def test_a_link_is_measured_by_two(pool):
    for link in pool.run(_link, ranks=2):
        assert 0 < link.latency_s < 1
        assert 1e3 < link.bandwidth < 1e14


def test_one_process_takes_a_default():
    assert _link(0, 1).bandwidth == pytest.approx(1e10)
