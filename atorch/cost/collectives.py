"""Seconds of a collective by the α–β model: a latency for every hop, and the bytes over the slowest link.

Rings, and trees where these answer sooner: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"; Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atorch.cluster import ClusterSpec
from atorch.cost.state import Collective


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, by what lies between them."""

    size: int
    num_nodes: int
    bandwidth: float  # bytes/s of one rank through its slowest link
    inner_latency_s: float  # of a hop inside a node
    outer_latency_s: float  # of a hop between nodes

    def seconds(self, kind: Collective, count: float, num_bytes: float) -> float:
        """The time of `count` calls that carry `num_bytes` together.

        Of n ranks, a ring hands pieces on n - 1 times, twice in an all-reduce, and every link carries (n - 1) / n of
        the payload as often. A double tree reduces and broadcasts over all nodes in twice their number's logarithm. A
        send is one hop with the whole payload. In an all-to-all every rank keeps one n-th of what it has.
        """
        if kind == "send":
            hop = self.outer_latency_s if self.num_nodes > 1 else self.inner_latency_s
            return count * hop + self.carrying_s(kind, num_bytes)
        rounds = rounds_of(kind)
        inner, outer = self.size / self.num_nodes - 1, self.num_nodes - 1
        latency = self.inner_latency_s * (self.size - self.num_nodes) + self.outer_latency_s * outer
        if kind == "all_reduce":
            tree = self.inner_latency_s * inner + self.outer_latency_s * math.log2(self.num_nodes)
            latency = rounds * min(latency, tree)
        return count * latency + self.carrying_s(kind, num_bytes)

    def carrying_s(self, kind: Collective, num_bytes: float) -> float:
        """Of these seconds, those in which the slowest link carries bytes."""
        passes = 1.0 if kind == "send" else rounds_of(kind) * (1 - 1 / self.size)
        return passes * num_bytes / self.bandwidth


def rounds_of(kind: Collective) -> float:
    """How often a ring of ranks is gone round."""
    return 2.0 if kind == "all_reduce" else 1.0


def group_of(names: tuple[str, ...], axes: Mapping[str, int], cluster: ClusterSpec) -> Group:
    """The groups over some axes of the mesh.

    Ranks number the first axis fastest, and consecutive ranks share a node. A group with k members on each of several
    nodes is bound by the k devices' links out of a node, where these are slower than the links inside.
    """
    size, inner, stride = 1, 1, 1
    for name, length in axes.items():
        if name in names:
            size *= length
            inner *= min(length, max(1, cluster.devices_per_node // stride))
        stride *= length
    return _group(size, inner, cluster)


def group_of_neighbours(size: int, cluster: ClusterSpec, stride: int = 1) -> Group:
    """Groups of `size` ranks that are `stride` apart."""
    return _group(size, min(size, max(1, cluster.devices_per_node // stride)), cluster)


def _group(size: int, inner: int, cluster: ClusterSpec) -> Group:
    inside, outside = cluster.intra_node, cluster.inter_node
    bandwidth = inside.bandwidth * inside.efficiency
    num_nodes = -(-size // inner)
    if num_nodes > 1:
        bandwidth = min(bandwidth, inner * outside.bandwidth * outside.efficiency)
    return Group(size, num_nodes, bandwidth, inside.latency_s, outside.latency_s)
