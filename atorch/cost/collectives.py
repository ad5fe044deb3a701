"""Seconds of a collective by the α–β model: a latency for every hop, and the bytes over the slowest link.

Ring algorithms; Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

from atorch.cost.state import Comm


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
