"""The cluster that a table's hardware text describes: its devices, and their network.

A device without a file of its own takes the nearest device's file, with the figures of its own data sheet. A blank text
means a device with as much memory. A text that names no known device is refused. "4x100Gb RoCE/node" is a network of
four ports of 100 Gbit/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError
from benchmarks.published.table import UNKNOWN

NODE = 8  # devices of a node by default


class _Device(NamedTuple):
    """A device by the pattern of its text: its file, and figures of its data sheet that differ."""

    pattern: str
    file: str
    memory_gib: float | None = None
    flops: float | None = None  # of 16-bit products, dense
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None  # inside a node


_DEVICES = (
    _Device(r"gb300", "gb300"),
    _Device(r"b300", "b300"),
    _Device(r"gb200", "gb200"),
    _Device(r"b200", "b200"),
    _Device(r"gh200", "h100_80g", memory_gib=94.5, memory_bandwidth=4e12),
    _Device(r"h200", "h200_141g"),
    _Device(r"h800", "h800_80g"),
    _Device(r"h100.*pcie|pcie.*h100", "h100_pcie_80g"),
    _Device(r"h100.*nvl\b", "h100_nvl_94g"),
    _Device(r"h100.*(hbm2e|500 ?w)", "h100_96g"),
    _Device(r"h100.*(96|94) ?gb", "h100_80g", memory_gib=94.5),
    _Device(r"h100", "h100_80g"),
    _Device(r"\bh20\b", "h20_96g"),
    _Device(r"a800", "a800_80g"),
    _Device(r"a100.*pcie.*nvlink", "a100_80g"),
    _Device(r"a100.*pcie|pcie.*a100", "a100_pcie_80g"),
    _Device(r"a100", "a100_80g"),
    _Device(r"a10g", "a10g"),
    _Device(r"\ba10\b", "a10"),
    _Device(r"l40s", "l40s"),
    _Device(r"\ba40\b", "rtx4090", memory_gib=44.4, flops=1.497e14, memory_bandwidth=6.96e11),
    _Device(r"a6000", "rtx4090", memory_gib=47.5, flops=1.548e14, memory_bandwidth=7.68e11),
    _Device(r"3090", "rtx4090", memory_gib=23.7, flops=7.1e13, memory_bandwidth=9.36e11),
    _Device(r"4090", "rtx4090"),
    _Device(r"5090", "rtx5090"),
    _Device(r"\bl4\b", "l4"),
    _Device(r"\bt4\b", "t4"),
    _Device(r"v100", "v100_16g"),
    _Device(r"p100", "v100_16g", memory_gib=15.9, flops=2.12e13, memory_bandwidth=7.32e11, link_bandwidth=8e10),
    _Device(r"mi210", "mi300x", memory_gib=64.0, flops=1.81e14, memory_bandwidth=1.6e12, link_bandwidth=1e11),
    _Device(r"tpu.?v4", "a100_40g", memory_gib=32.0, flops=2.75e14, memory_bandwidth=1.2e12),
    _Device(r"tpu.?v5p", "h100_80g", memory_gib=95.0, flops=4.59e14, memory_bandwidth=2.765e12),
    _Device(r"tpu.?v5e", "v100_16g", memory_gib=16.0, flops=1.97e14, memory_bandwidth=8.1e11),
    _Device(r"mi250", "mi300x", memory_gib=64.0, flops=1.915e14, memory_bandwidth=1.6e12, link_bandwidth=1e11),
    _Device(r"mi300x", "mi300x"),
)
_SMALLER: Mapping[str, tuple[float, str]] = {"a100_80g": (48, "a100_40g"), "a100_pcie_80g": (48, "a100_pcie_40g")}
_BY_MEMORY: Mapping[str, float] = {
    "v100_16g": 16, "l4": 24, "v100_32g": 32, "a100_40g": 40, "a100_80g": 80, "h200_141g": 141, "b200": 180,
}  # fmt: skip
_PORTS = re.compile(
    r"(?:(?P<count>\d+)\s*x\s*)?(?P<rate>\d+)\s*g(?:bps|b/s|bit/s|b)\s*(?:edr|hdr|ndr|fdr)?\s*"
    r"(?:ib|infiniband|roce|rdma|ethernet|efa|omni-?path|cx-?\d+|connectx-?\d*)\b"
    r"(?P<each>\s*(?:/|per) ?(?:gpu|device))?"
)
_OMNI_PATH = re.compile(r"(?P<count>\d+)\s*x\s*omni-?path (?P<rate>\d+)")
_NETWORKS: Mapping[str, Mapping[str, float]] = {
    # As it was in 2024, when the tables' runs were: collectives of 256 MB on 2 to 64 p5.48xlarge by themselves, two
    # figures by all-gathers and reduce-scatters, the third then by all-reduces (Ultra-Scale Playbook,
    # pp_comm_bandwidth). What such machines reach since then is in their file.
    "efa": {"inter_node.latency_s": 3.7e-5, "inter_node.efficiency": 0.73, "tree_efficiency": 0.19},
}


def cluster_described(hardware: str, memory_gb: float | None, num_devices: int, per_node: int | None) -> ClusterSpec:
    """The cluster of `num_devices` devices, from a table's text, a device's memory and the devices of a node.

    Raises:
        ArgumentError: the text names no device that is known.
    """
    words = hardware.lower()
    joined = 72 if re.search(r"nvl72|gb[23]00", words) else 0  # by NVLink, over trays of four
    per_node = min(max(joined, per_node or NODE), num_devices)
    device = next((known for known in _DEVICES if re.search(known.pattern, words)), None)
    if device is None and words.strip() not in UNKNOWN:
        raise ArgumentError(f"hardware is {hardware!r}, which names no device that is known; such as 'H100-80GB'")
    if device is None:
        file, figures = _nearest(memory_gb), {"device.memory_gib": 0.95 * memory_gb} if memory_gb else {}
    else:
        file, figures = device.file, _figures(device)
    most, smaller = _SMALLER.get(file, (0.0, file))
    if memory_gb and memory_gb <= most:
        file = smaller
    if file == "v100_16g" and memory_gb and memory_gb > 24:
        file = "v100_32g"
    return ClusterSpec.load(file, -(-num_devices // per_node), per_node, {**figures, **network_of(words, NODE)})


def _nearest(memory_gb: float | None) -> str:
    return min(_BY_MEMORY, key=lambda file: abs(_BY_MEMORY[file] - (memory_gb or 80.0)))


def _figures(device: _Device) -> dict[str, float]:
    figures = {
        "device.memory_gib": device.memory_gib,
        "device.peak_flops.bfloat16": device.flops,
        "device.peak_flops.float16": device.flops,
        "device.memory_bandwidth": device.memory_bandwidth,
        "intra_node.bandwidth": device.link_bandwidth,
    }
    return {place: value for place, value in figures.items() if value is not None}


def network_of(words: str, per_node: int) -> dict[str, float]:
    """Figures of `inter_node` in a hardware's text, by their place in a cluster.

    A rate is that of a node, and a rank has its share of it, unless the text says "per GPU".
    """
    figures = {place: value for word, known in _NETWORKS.items() if word in words for place, value in known.items()}
    ports = _PORTS.search(words) or _OMNI_PATH.search(words)
    if ports is not None:
        shared_by = 1 if ports.groupdict().get("each") else per_node
        figures["inter_node.bandwidth"] = int(ports["count"] or 1) * int(ports["rate"]) * 1e9 / 8 / shared_by
    return figures
