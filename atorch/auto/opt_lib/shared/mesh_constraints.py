"""Consistency of a mesh with the other methods of a strategy.

Every axis needs a method that splits over it, and every method that splits needs its axis. Methods declare their axes
(`Method.splits`) and companions (`Method.needs`), so the rules here name no method.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atorch.auto.opt_lib.shared.defaults import SLOT
from atorch.auto.strategy.method import Method
from atorch.cost.parallelism import REPLICA_AXES


def disagreement(methods: Collection[Method], axes: Mapping[str, int]) -> str | None:
    """The reason why `methods` do not match the mesh `axes` (name → size), or None.

    Every axis but data needs a method that splits over it, and every method that splits needs one of its axes. Where
    processes hold the same parameters, a method of the slot data_parallel is needed; elsewhere none may need replicas.
    Only fsdp distinguishes zero from data: its shards stay within zero. Other methods treat both as one axis.
    """
    large = {name for name, size in axes.items() if size > 1}
    split = {axis for method in methods for axis in method.splits}
    for axis in sorted(large - {"data"} - split):
        return f"no method splits over {axis}"
    is_shared = not large.isdisjoint(REPLICA_AXES)
    for method in methods:
        if method.slot == SLOT:
            if method.needs_replicas and not is_shared:
                return f"{method.name} has no two processes that hold the same parameters"
        elif method.splits and large.isdisjoint(method.splits):
            return f"{method.name} has no axis {' or '.join(method.splits)} to split over"
    if is_shared and not any(method.slot == SLOT for method in methods):
        return f"several processes hold the same parameters, and no method of the slot {SLOT} keeps them equal"
    return incomplete(methods)


def incomplete(methods: Collection[Method]) -> str | None:
    """The reason why a method lacks the one that it completes, or None."""
    names = {method.name for method in methods}
    for method in methods:
        for name in method.needs:
            if name not in names:
                return f"{method.name} completes {name}, which is not there"
    return None
