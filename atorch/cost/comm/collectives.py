"""Seconds of a collective by the α–β model: a latency for every hop, and the bytes over the slowest link.

Ranks of a ring over several nodes proceed in lockstep. Published all-gathers and reduce-scatters by number of nodes
show it: 32 MB to 2 GB on 2 to 32 nodes of 8 H100s over EFA, 9 µs a rank (crazyguitar/aws-gpu-communication-benchmark at
fd167f9, data/nccl_all_gather.csv), mean error 7.5 %; 256 MB on 1 to 64 such nodes with older software, 37 µs a rank
(Ultra-Scale Playbook, nanotron), within 21 %; 2 GB on 32 nodes over InfiniBand (NVIDIA/nccl issue 1218), 19 µs a rank,
where NCCL's own model has 14 µs for its network.

Collectives use rings, or trees if those are faster: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"; Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from atorch.cluster.spec import ClusterSpec
from atorch.cost.state import Collective
from atorch.units import MiB

TREE_PIECE = 4 * MiB
"""Bytes of an all-reduce that a tree hop forwards at once: NCCL's buffer. The data of `TREE_EFFICIENCY` give 4.5 MB."""


class Link(NamedTuple):
    """A rank's link to some of the others."""

    ranks: int
    bandwidth: float  # bytes/s


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Ranks that communicate, described by their links."""

    size: int
    num_nodes: int
    bandwidth: float  # bytes/s of a ring through its slowest link
    inner_latency_s: float  # of a hop inside a node
    outer_latency_s: float  # of a hop between nodes
    num_leaves: int = 1
    leaf_latency_s: float = 0.0  # of a hop between leaves
    tree_bandwidth: float = math.inf  # bytes/s that a tree carries inside a node
    links: tuple[Link, ...] = ()  # of one rank

    def seconds(self, kind: Collective, count: float, num_bytes: float) -> float:
        """The time of `count` calls that carry `num_bytes` together.

        A ring of n ranks makes n - 1 steps, and each link carries (n - 1) / n of the payload; an all-reduce does this
        twice. Ranks proceed in lockstep, so over several nodes every step takes as long as a hop between nodes. A
        double tree reduces and broadcasts over all nodes in twice the logarithm of their number: small payloads use
        trees, large ones rings. A send is one hop with the full payload, through one rank's slowest link. In an
        all-to-all every rank keeps 1 / n of its payload, and sends as much to each other rank through its own links.
        """
        far = self.leaf_latency_s if self.num_leaves > 1 else self.outer_latency_s
        if kind == "send":
            hop = far if self.num_nodes > 1 else self.inner_latency_s
            return count * hop + self.carrying_s(kind, num_bytes)
        inner, outer, across = self.size - self.num_nodes, self.num_nodes - self.num_leaves, self.num_leaves - 1
        if self.num_nodes == 1:
            latency = self.inner_latency_s * inner
        elif kind in ("broadcast", "all_to_all"):  # a chain, and independent messages
            latency = self.inner_latency_s * inner + self.outer_latency_s * outer + self.leaf_latency_s * across
        else:
            latency = max(self.inner_latency_s, far) * (self.size - 1)
        ring_s = count * rounds_of(kind) * latency + self.carrying_s(kind, num_bytes)
        return min(ring_s, self._tree_s(count, num_bytes)) if kind == "all_reduce" and self.num_nodes > 1 else ring_s

    def _tree_s(self, count: float, num_bytes: float) -> float:
        """An all-reduce's time by a double tree over the nodes, with a chain inside each node.

        The pipeline of hops fills with pieces of `TREE_PIECE`, or with smaller ones if the payload is small.
        """
        latency = (
            self.inner_latency_s * (self.size - self.num_nodes) / self.num_nodes
            + self.outer_latency_s * math.log2(self.num_nodes / self.num_leaves)
            + self.leaf_latency_s * math.log2(self.num_leaves)
        )
        hops = (self.size - self.num_nodes) / self.num_nodes + math.log2(self.num_nodes)
        filling = min(count * hops * TREE_PIECE, num_bytes)
        inside = self.tree_bandwidth if self.size > self.num_nodes else math.inf
        return 2.0 * (count * latency + (filling + num_bytes) / min(self.bandwidth, inside))

    def carrying_s(self, kind: Collective, num_bytes: float) -> float:
        """The part of `seconds` in which the slowest link carries bytes."""
        if kind == "send":
            return num_bytes / min((link.bandwidth for link in self.links), default=self.bandwidth)
        if kind == "all_to_all" and self.links:
            return num_bytes * max(link.ranks / self.size / link.bandwidth for link in self.links)
        return rounds_of(kind) * (1 - 1 / self.size) * num_bytes / self.bandwidth


def rounds_of(kind: Collective) -> float:
    """The number of passes around a ring."""
    return 2.0 if kind == "all_reduce" else 1.0


def group_of(names: tuple[str, ...], axes: Mapping[str, int], cluster: ClusterSpec) -> LinkGroup:
    """The groups over some axes of the mesh.

    Ranks number the first axis fastest, and consecutive ranks share a node. A group with k members on each of several
    nodes is bound by these k devices' links out of a node, if they are slower than the links inside. The same holds for
    links out of a leaf.
    """
    size, in_node, in_leaf, stride = 1, 1, 1, 1
    for name, length in axes.items():
        if name in names:
            size *= length
            in_node *= min(length, max(1, cluster.devices_per_node // stride))
            in_leaf *= min(length, max(1, cluster.devices_per_leaf // stride))
        stride *= length
    return _group(size, in_node, in_leaf, cluster)


def group_of_neighbours(size: int, cluster: ClusterSpec, stride: int = 1) -> LinkGroup:
    """Groups of `size` ranks that are `stride` apart."""
    in_node, in_leaf = (
        min(size, max(1, devices // stride)) for devices in (cluster.devices_per_node, cluster.devices_per_leaf)
    )
    return _group(size, in_node, in_leaf, cluster)


def _group(size: int, in_node: int, in_leaf: int, cluster: ClusterSpec) -> LinkGroup:
    inside, outside, across = cluster.intra_node, cluster.inter_node, cluster.inter_leaf
    links = [Link(in_node - 1, inside.bandwidth * inside.efficiency)] if in_node > 1 else []
    bandwidth = inside.bandwidth * inside.efficiency
    trees = cluster.tree_efficiency * bandwidth
    num_nodes = -(-size // in_node)
    if num_nodes > 1:
        links.append(Link(size - in_node, outside.bandwidth * outside.efficiency))
        bandwidth = min(bandwidth, in_node * links[-1].bandwidth)
    num_leaves, leaf_latency = 1 if across is None else -(-size // in_leaf), 0.0
    if across is not None and num_leaves > 1:
        links.append(Link(size - in_leaf, across.bandwidth * across.efficiency))
        bandwidth = min(bandwidth, in_leaf * links[-1].bandwidth)
        leaf_latency = max(outside.latency_s, across.latency_s)  # messages that leave a leaf also leave their node
    latencies = inside.latency_s, outside.latency_s
    return LinkGroup(size, num_nodes, bandwidth, *latencies, num_leaves, leaf_latency, trees, tuple(links))
