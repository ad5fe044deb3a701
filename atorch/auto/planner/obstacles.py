"""Changes to make where no composition is legal, each really tried."""

from __future__ import annotations

from collections.abc import Iterable

from atorch.auto.planner.space import MESH, compositions, names_in
from atorch.auto.strategy import METHODS, Exactness, Strategy
from atorch.cluster import ClusterSpec
from atorch.cost import ModelProfile, plain_cost
from atorch.errors import StrategyError


def obstacles(
    profile: ModelProfile,
    cluster: ClusterSpec,
    excluded: Iterable[str] | None,
    included: Iterable[str] | None,
    fixed: Strategy | None,
    precision: Exactness,
) -> str:
    """Advice where no composition is legal: each name that alone leaves some when it is not given."""
    barred, needed = names_in(excluded, "excluded"), names_in(included, "included")
    start = plain_cost(profile, profile.batch_size * cluster.world_size)

    def opens(out: Iterable[str], within: Iterable[str]) -> bool:
        try:
            space = compositions(profile, cluster, excluded=out, included=within, precision=precision)
        except StrategyError:
            return False
        return next(space.leaves(space.root(start)), None) is not None

    space = compositions(profile, cluster, excluded=excluded, included=included, fixed=fixed, precision=precision)
    next(space.leaves(space.root(start)), None)
    why = "; ".join(reason for reason, _ in space.refused.most_common(2))
    if fixed is not None:
        return f"{fixed} cannot be here: {why or 'its methods do not agree'}. Give another strategy"
    alone = [name for name in needed if opens(barred, [each for each in needed if each != name])]
    ways = [f"leave {name} out of included: {_idle(name, cluster) or why or 'it has nothing to do'}" for name in alone]
    ways += [
        f"take {name} out of excluded" for name in barred if opens([each for each in barred if each != name], needed)
    ]
    if not ways and needed:
        ways = [f"include fewer methods than {', '.join(needed)}: {why or 'they do not agree'}"]
    return "; or ".join(ways) or f"{why or 'everything is excluded'}. Exclude fewer methods"


def _idle(name: str, cluster: ClusterSpec) -> str:
    """Why a method has nothing to do on one process, where it has not."""
    kind = METHODS[name]
    if cluster.world_size > 1 or not (kind.needs_replicas or kind.slot == MESH or kind.of().splits):
        return ""
    return f"{name} has nothing to share out on one process; start several with torchrun to use it"
