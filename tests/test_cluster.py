"""Cluster files hold what they must; detection measures what no file describes."""

import json

import pytest
import torch

from atorch.cluster import ClusterSpec
from atorch.cluster_catalogue import FILES
from atorch.distributed.world import World
from atorch.errors import ArgumentError
from atorch.measure import MATMUL_DTYPES


@pytest.mark.parametrize("name", ["a100_40g", "a100_80g", "h100_80g", "h200_141g", "l4", "rtx4090", "v100_32g"])
def test_shipped_files_load(name):
    cluster = ClusterSpec.load(name, num_nodes=2)
    assert cluster.world_size == 2 * cluster.devices_per_node
    assert cluster.device.peak_flops["float16"] > cluster.device.peak_flops["float32"]


def test_a_file_loads_and_its_faults_are_named(tmp_path):
    data = json.loads((FILES / "l4.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert ClusterSpec.load(path, devices_per_node=3).world_size == 3
    data["device"]["memory_bandwidth"] = -1
    path.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="memory_bandwidth = -1"):
        ClusterSpec.load(path)
    data["device"]["memory_bandwidth"] = 3e11
    del data["intra_node"]
    path.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="no object 'intra_node'"):
        ClusterSpec.load(path)
    path.write_text("{")
    with pytest.raises(ArgumentError, match="cannot be read"):
        ClusterSpec.load(path)


def test_an_unknown_name_suggests_a_near_one():
    with pytest.raises(ArgumentError, match="h100_80g"):
        ClusterSpec.load("h100")


def test_detecting_a_cpu_measures_it():
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    cluster = ClusterSpec.detect(world)
    assert cluster.world_size == 1
    assert set(cluster.device.peak_flops) == set(MATMUL_DTYPES)
    assert all(flops > 1e6 for flops in cluster.device.peak_flops.values())
    assert cluster.device.memory_bytes > 2**20
    assert not ClusterSpec.detect(world, measure=False).device.peak_flops
