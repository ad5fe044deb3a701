"""A cluster file is held to what it must have; its faults are named."""

import copy
import json

import pytest

from atorch.cluster.catalogue import FILES, _known
from atorch.cluster.file import SHIPPED, cluster_of, data_of, with_source
from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError

ABSENT = object()
LEAST = {
    "device": {"memory_gib": 1, "peak_flops": {"float32": 1e12}, "memory_bandwidth": 1e11, "launch_s": 1e-6},
    "intra_node": {"bandwidth": 1e9, "latency_s": 1e-5},
    "inter_node": {"bandwidth": 1e9, "latency_s": 1e-5},
}


def changed(data, place, value):
    """`data` with another value at a place, or without it."""
    data = copy.deepcopy(data)
    *above, last = place.split(".")
    part = data
    for name in above:
        part = part[name]
    if value is ABSENT:
        del part[last]
    else:
        part[last] = value
    return data


def test_the_least_that_a_file_must_have():
    cluster = cluster_of(LEAST, "mine.json")
    assert cluster.world_size == 1
    assert cluster.device.name == "mine"
    assert cluster.device.efficiency.matmul == 0.75  # its peaks are taken to be a data sheet's


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("device.memory_gib", 0, "device.memory_gib = 0; it is GiB between"),
        ("device.memory_gib", 8.6e10, "device.memory_gib = 86000000000.0; it is GiB"),
        ("device.memory_bandwidth", -1, "device.memory_bandwidth = -1; it is bytes/s between"),
        ("device.memory_bandwidth", 3.35, "device.memory_bandwidth = 3.35"),
        ("device.memory_bandwidth", ABSENT, "has no device.memory_bandwidth; it is bytes/s"),
        ("device.launch_s", True, "device.launch_s = True"),
        ("device.peak_flops.float32", "fast", "device.peak_flops.float32 = 'fast'; it is FLOP/s"),
        ("device.peak_flops.bf16", 1e12, "unknown device.peak_flops.bf16; did you mean 'bfloat16'"),
        ("device.capability", 9.0, r"device.capability = 9.0; it is a pair of whole numbers such as \[9, 0\]"),
        ("device.name", 7, "device.name = 7; it is text"),
        ("device.efficiency", {"matmul": 1.2}, "device.efficiency.matmul = 1.2; it is a share"),
        ("device.efficiency", {"matmull": 0.5}, "unknown device.efficiency.matmull; did you mean 'matmul'"),
        ("device.attention", {"flash9": {"forward": 0.5, "backward": 0.5}}, "device.attention.flash9"),
        ("device.matmul_efficiency", 0.5, "unknown device.matmul_efficiency; did you mean 'efficiency'"),
        ("device", [], r"has \[\] at device; it is an object"),
        ("devices_per_node", 2.5, "devices_per_node = 2.5; it is a whole number"),
        ("num_nodes", 0, "num_nodes = 0; it is a count"),
        ("intra_node", ABSENT, "no object 'intra_node'"),
        ("intra_node.bandwidth", 1e15, r"bandwidth = 1000000000000000.0; it is bytes/s between 1000 and 1e\+14"),
        ("inter_node.latency_s", 12.0, "inter_node.latency_s = 12.0; it is seconds between 0 and 1"),
        ("inter_node.efficiency", float("nan"), "inter_node.efficiency = nan; it is a share"),
        ("host_link", {"bandwidth": 1e10}, "has no host_link.latency_s"),
        ("nodes_per_leaf", 16, "no object 'inter_leaf'"),
        ("inter_leaf", {"bandwidth": 1e10, "latency_s": 1e-5}, "has no nodes_per_leaf; it is a count"),
        ("uncertainty", {"products": {"products": 0.01}}, "has no object 'uncertainty.attention'"),
        ("uncertainty", {"product": {}}, "unknown uncertainty.product; did you mean 'products'"),
        ("host_memory_gib", None, "host_memory_gib = None"),
        ("hostmemory_gib", 5, "unknown hostmemory_gib; did you mean 'host_memory_gib'"),
        ("sources", {"device.memory": "a guess"}, "'device.memory', which is no place in it; did you mean"),
        ("sources", ["a guess"], "sources = .*; it is an object of places and texts"),
    ],
)  # fmt: skip
def test_a_fault_is_named(place, value, told):
    with pytest.raises(ArgumentError, match=rf"the cluster file mine\.json .*{told}"):
        cluster_of(changed(LEAST, place, value), "mine.json")


def test_a_list_is_no_cluster():
    with pytest.raises(ArgumentError, match=r"has \[1\]; it is an object"):
        ClusterSpec.of_json_data([1])


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_data_are_what_they_were_read_from(path):
    data = _known(path)
    cluster = cluster_of(data, path.name)
    written = json.loads(json.dumps(data_of(cluster)))
    assert cluster_of(written, "again") == cluster
    assert written == {
        **{key: value for key, value in data.items() if key not in SHIPPED},
        "device": {"capability": None, **data["device"]},
        "num_nodes": 1,
    }


def test_leaves_are_read_and_written():
    link = {"bandwidth": 1e8, "latency_s": 1e-5, "efficiency": 0.5}
    cluster = cluster_of({**LEAST, "num_nodes": 64, "nodes_per_leaf": 16, "inter_leaf": link}, "mine.json")
    assert (cluster.nodes_per_leaf, cluster.devices_per_leaf) == (16, 16)
    written = json.loads(json.dumps(data_of(cluster)))
    assert (written["nodes_per_leaf"], written["inter_leaf"]) == (16, link)
    assert cluster_of(written, "again") == cluster
    assert cluster_of(LEAST, "mine.json").devices_per_leaf == 1


def test_a_source_replaces_those_of_its_parts():
    sources = {"device": "a", "device.peak_flops": "b", "device.peak_flops.float32": "c", "device.peak": "d"}
    assert with_source(sources, "device.peak_flops", "new") == {
        "device": "a", "device.peak": "d", "device.peak_flops": "new",
    }  # fmt: skip
