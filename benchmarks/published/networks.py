"""What a table's hardware says of the network between nodes: "4x100Gb RoCE/node" is four ports of 100 Gbit/s."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PORTS = re.compile(
    r"(?:(?P<count>\d+)\s*x\s*)?(?P<rate>\d+)\s*g(?:bps|b/s|bit/s|b)\s*(?:edr|hdr|ndr|fdr)?\s*"
    r"(?:ib|infiniband|roce|rdma|ethernet|efa)\b"
)
_BY_NAME: Mapping[str, Mapping[str, float]] = {
    # Fitted by fit.py on runs without pipelines: of a hop from node to node, and of the line rate.
    "efa": {"inter_node.latency_s": 5.2e-4, "inter_node.efficiency": 0.32},
}


def network_of(hardware: str, devices_per_node: int) -> dict[str, float]:
    """Figures of `inter_node`, by their place in a cluster, that the text of a hardware tells; none of others.

    Where a rate is written it is of a node; what a rank has of it is its share.
    """
    words = hardware.lower()
    figures = {place: value for word, known in _BY_NAME.items() if word in words for place, value in known.items()}
    ports = _PORTS.search(words)
    if ports is not None:
        rate = int(ports["count"] or 1) * int(ports["rate"]) * 1e9 / 8
        figures["inter_node.bandwidth"] = rate / devices_per_node
    return figures
