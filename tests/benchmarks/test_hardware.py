"""What tables say of hardware, as clusters."""

import pytest

from atorch.errors import ArgumentError
from atorch.units import GiB
from benchmarks.published.hardware import cluster_described, network_of


@pytest.mark.parametrize(
    ("text", "per_node"),
    [
        ("A100-80GB (8/node NVSwitch; multi: 800 Gbps IB/node)", 1e11), ("A100-80GB-SXM4 (4x100Gb RoCE/node)", 5e10),
        ("V100-SXM2-16GB (8/node NVLink, 100Gb EDR IB)", 1.25e10), ("A100-80GB (NVLink, 800 Gb/s RDMA/node)", 1e11),
        ("A100-80GB (NVLink, 4x100Gb Omni-Path/node)", 5e10), ("A100-80GB-SXM (8/node, 4x Omni-Path 100)", 5e10),
        ("H100-96GB (NVLink, 400Gb/s RDMA per GPU)", 4e11), ("H200-141GB (NVLink, 400Gb/s CX-7 per GPU)", 4e11),
        ("H100-80GB-SXM", None), ("B200-SXM 8x", None),
    ],
)  # fmt: skip
def test_a_network_is_shared_by_the_devices_of_a_node(text, per_node):
    expected = {} if per_node is None else {"inter_node.bandwidth": per_node / 8}
    assert network_of(text.lower(), 8) == expected


@pytest.mark.parametrize(
    ("text", "memory_gb", "name"),
    [
        ("H100-80GB-SXM (EFA)", 80, "NVIDIA H100 80GB HBM3"), ("A100-40GB PCIe", 40, "NVIDIA A100-PCIE-40GB"),
        ("A100 PCIe", 80, "NVIDIA A100 80GB PCIe"), ("A800-80GB", 80, "NVIDIA A800-SXM4-80GB"),
        ("H100-96GB HBM2e 500W Grand Teton", 96, "NVIDIA H100 96GB HBM2e (500 W)"),
        ("MI300X", 192, "AMD Instinct MI300X"), ("DGX-GB300", None, "NVIDIA GB300"),
        ("Tesla V100-SXM2", 32, "Tesla V100-SXM2-32GB"), ("L4, 8/node", 24, "NVIDIA L4"),
        ("H100 PCIe", 80, "NVIDIA H100 PCIe"), ("Tesla P100", 16, "Tesla V100-SXM2-16GB"),
        ("", 40, "NVIDIA A100-SXM4-40GB"), ("", None, "NVIDIA A100-SXM4-80GB"),
    ],
)  # fmt: skip
def test_the_nearest_known_device(text, memory_gb, name):
    assert cluster_described(text, memory_gb, 16, None).device.name == name


def test_devices_by_their_data_sheets():
    device = cluster_described("8x A10G", 24, 8, 8).device
    assert (device.peak_flops["bfloat16"], device.memory_bandwidth) == (7e13, 6e11)
    assert cluster_described("", 64, 8, 8).device.memory_bytes == pytest.approx(0.95 * 64 * GiB)

    clusters = {name: cluster_described(name, None, 144, None) for name in ("B200", "GB200 NVL72", "B300", "GB300")}
    assert len({each.device.name for each in clusters.values()}) == 4
    assert len({each.device.peak_flops["bfloat16"] for each in clusters.values()}) == 2
    assert {name: each.devices_per_node for name, each in clusters.items() if "G" in name} == {
        "GB200 NVL72": 72,
        "GB300": 72,
    }

    assert cluster_described("A100-40GB PCIe", 40, 8, 8).intra_node.bandwidth == 3.15e10
    assert cluster_described("A100 PCIe with NVLink", 40, 8, 8).intra_node.bandwidth == 3e11

    clusters = [cluster_described("H100", 80, *counts) for counts in ((64, 8), (64, 4), (2, 8), (9, None))]
    assert [(each.num_nodes, each.devices_per_node) for each in clusters] == [(8, 8), (16, 4), (1, 2), (2, 8)]


@pytest.mark.parametrize("text", ["abacus", "B400", "MI300A", "MI455X", "something new"])
def test_a_device_that_is_not_known_is_refused_by_its_name(text):
    with pytest.raises(ArgumentError, match=text):
        cluster_described(text, 80, 8, 8)
