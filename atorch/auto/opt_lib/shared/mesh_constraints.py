"""Agreement between a mesh and the methods beside it.

An axis is there for a method that splits over it, and a method that splits has its axis. Methods name their axes
(`Method.splits`) and companions (`Method.needs`), so that the rule knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atorch.auto.opt_lib.shared.defaults import SLOT
from atorch.auto.strategy.method import Method
from atorch.cost.parallelism import REPLICA_AXES


def disagreement(methods: Collection[Method], axes: Mapping[str, int]) -> str | None:
    """Why `methods` do not make use of the mesh `axes` (name → size) as it is, or None where they do.

    Every axis but data has a method that splits over it, and every method that splits has one of its axes; parameters
    that several processes hold have a method of the slot data_parallel, and others have none that needs several. Ranks
    of zero are told from those of data by fsdp alone, whose shards stay among them: others have one axis for both.
    """
    large = {name for name, size in axes.items() if size > 1}
    split = {axis for each in methods for axis in each.splits}
    for axis in sorted(large - {"data"} - split):
        return f"no method splits over {axis}"
    is_shared = not large.isdisjoint(REPLICA_AXES)
    for each in methods:
        if each.slot == SLOT:
            if each.needs_replicas and not is_shared:
                return f"{each.name} has no two processes that hold the same parameters"
        elif each.splits and large.isdisjoint(each.splits):
            return f"{each.name} has no axis {' or '.join(each.splits)} to split over"
    if is_shared and not any(each.slot == SLOT for each in methods):
        return f"several processes hold the same parameters, and no method of the slot {SLOT} keeps them equal"
    return incomplete(methods)


def incomplete(methods: Collection[Method]) -> str | None:
    """Why one of `methods` is without the one that it completes, or None where none is."""
    names = {each.name for each in methods}
    for each in methods:
        for name in each.needs:
            if name not in names:
                return f"{each.name} completes {name}, which is not there"
    return None
