"""Scores compositions: a fold over the tree of strategies, in which what they begin with in common is folded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atorch.auto.planner.plan import Estimate, Rejected
from atorch.auto.strategy import Method, Strategy
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, peak_memory, step_seconds
from atorch.units import format_bytes

RESERVE = 0.08  # of a device's memory, for what no category counts: allocator slack, library workspaces


@dataclass(frozen=True)
class Scored:
    """A composition with what arithmetic says of it."""

    strategy: Strategy
    estimate: Estimate


def score(strategies: Sequence[Strategy], start: Cost, cluster: ClusterSpec) -> list[Scored]:
    """Every strategy with its estimate, the fastest first."""
    scored = [Scored(strategy, estimate_of(cost, cluster)) for strategy, cost in fold(strategies, start)]
    return sorted(scored, key=lambda each: (each.estimate.step_s, each.estimate.peak_bytes, str(each.strategy)))


def fold(strategies: Sequence[Strategy], cost: Cost, depth: int = 0) -> Iterator[tuple[Strategy, Cost]]:
    """`(strategy, strategy.cost(cost))` for each strategy; those that begin alike share the folding of that."""
    branches: dict[int, tuple[Method, list[Strategy]]] = {}
    for strategy in strategies:
        if len(strategy) == depth:
            yield strategy, cost
        else:
            each = strategy.methods[depth]
            branches.setdefault(id(each), (each, []))[1].append(strategy)
    for each, members in branches.values():
        yield from fold(members, each.cost(cost), depth + 1)


def estimate_of(cost: Cost, cluster: ClusterSpec) -> Estimate:
    """The seconds and bytes of a step."""
    memory = peak_memory(cost)
    return Estimate(step_s=step_seconds(cost, cluster), peak_bytes=memory.total, memory=memory.by_category())


def usable_bytes(cluster: ClusterSpec) -> float:
    """What a strategy may take of a device's memory."""
    return cluster.device.memory_bytes * (1 - RESERVE)


def split_by_memory(scored: Sequence[Scored], cluster: ClusterSpec) -> tuple[list[Scored], list[Rejected]]:
    """What fits, and what cannot, with the bytes by category."""
    limit = usable_bytes(cluster)
    fitting = [each for each in scored if each.estimate.peak_bytes <= limit]
    rejected = [
        Rejected(strategy=each.strategy, why="memory", reason=needs(each.estimate, limit), estimate=each.estimate)
        for each in scored
        if each.estimate.peak_bytes > limit
    ]
    return fitting, rejected


def needs(estimate: Estimate, limit: float) -> str:
    """Why an estimate does not fit: how much is short, and what takes the most."""
    most = ", ".join(f"{name} {format_bytes(held)}" for name, held in list(estimate.memory.items())[:3])
    short = format_bytes(estimate.peak_bytes - limit)
    return f"needs {format_bytes(estimate.peak_bytes)}, {short} more than the usable {format_bytes(limit)}: {most}"
