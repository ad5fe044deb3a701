"""Seconds of a collective by the α–β model: a latency for every hop, and the bytes over the slowest link.

Ring algorithms; Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from collections.abc import Mapping

from atorch.cluster import ClusterSpec, LinkSpec
from atorch.cost.state import Comm


def comm_seconds(comm: Comm, axes: Mapping[str, int], cluster: ClusterSpec) -> float:
    """The time of all of `comm`'s calls over the mesh `axes` (the first varies fastest), nothing hidden."""
    num_ranks, link = group_link(comm.axis, axes, cluster)
    return collective_seconds(comm, num_ranks, link.bandwidth, link.latency_s)


def group_link(names: tuple[str, ...], axes: Mapping[str, int], cluster: ClusterSpec) -> tuple[int, LinkSpec]:
    """The size of the groups over some axes, and the link that bounds them.

    Ranks number the first axis fastest, and consecutive ranks share a node. A group with k members on each of several
    nodes is bound by the k devices' links out of a node, where these are slower than the links inside.
    """
    size, stride, span = 1, 1, 1
    for name, length in axes.items():
        if name in names and length > 1:
            size *= length
            span = stride * length
        stride *= length
    if span <= cluster.devices_per_node:
        return size, cluster.intra_node
    inner = _members_in_a_node(names, axes, cluster.devices_per_node)
    bandwidth = min(cluster.intra_node.bandwidth, inner * cluster.inter_node.bandwidth)
    return size, LinkSpec(bandwidth=bandwidth, latency_s=cluster.inter_node.latency_s)


def _members_in_a_node(names: tuple[str, ...], axes: Mapping[str, int], devices: int) -> int:
    """How many members of a group are on one node."""
    members, stride = 1, 1
    for name, length in axes.items():
        room = max(1, devices // stride)
        if name in names:
            members *= min(length, room)
        stride *= length
    return members


def collective_seconds(comm: Comm, num_ranks: float, bandwidth: float, latency_s: float) -> float:
    """The time of all of `comm`'s calls, nothing hidden.

    With n ranks, an all-reduce takes 2 (n - 1) hops and carries 2 (n - 1) / n of the payload over each link; the
    others half of that. A send is one hop with the whole payload.
    """
    if comm.kind == "send":
        return comm.count * latency_s + comm.num_bytes / bandwidth
    rounds = 2.0 if comm.kind == "all_reduce" else 1.0
    hops = rounds * (num_ranks - 1)
    return comm.count * hops * latency_s + hops / num_ranks * comm.num_bytes / bandwidth
