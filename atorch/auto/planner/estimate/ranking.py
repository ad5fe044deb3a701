"""Compositions worth a dry run: those that fit, the fastest by estimate first, and why the others are out.

A small space is scored whole. Of a large one, which on a thousand devices has tens of thousands, bounds lead to the
fastest (`best_first`), and what is simplest is added. Either way some hundreds are left, so what a search holds does
not grow with the cluster. Rank 0 alone works it out; the others are told, method by method as texts and composition by
composition as indices of these, since a user's method may be of a class that cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.dry_run.trial_order import simplest
from atorch.auto.planner.estimate.score import (
    Scored,
    estimate_of,
    fastest_first,
    scored,
    split_by_memory,
    usable_bytes,
    usable_host_bytes,
)
from atorch.auto.planner.estimate.tie_breaking import TIE
from atorch.auto.planner.plan import Estimate, Rejected, Why
from atorch.auto.planner.search.best_first import best_first
from atorch.auto.planner.search.space import Space, compositions
from atorch.auto.strategy import EXACTNESS, Exactness, Method, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile

ALL_SCORED = 2_000  # compositions up to which all are scored; of more, those that bounds lead to first
MOST_SCORED = 4_000
MOST_LOOKS = 10_000  # at branches of the tree
RUNNABLE = 400  # that dry runs are chosen from, and a quarter as many that are simple
NEAREST = 20  # that are told where nothing fits


@dataclass(frozen=True)
class Ranking:
    """A ranking before anything ran: the compositions that fit, the fastest first, and those that are out."""

    fitting: tuple[Scored, ...]
    rejected: tuple[Rejected, ...]

    @property
    def num_compositions(self) -> int:
        """All compositions that were scored and that this machine can run, fitting or not."""
        return len(self.fitting) + sum(each.why != "hardware" for each in self.rejected)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The space that a search may take: see `space.compositions`.

    precision: the least exact numbers; None for autocast, and for less only where nothing else fits.
    """

    excluded: Iterable[str] | None = None
    included: Iterable[str] | None = None
    fixed: Strategy | None = None
    precision: Exactness | None = None

    @property
    def levels(self) -> tuple[Exactness, ...]:
        """Exactness that is allowed, and what more where nothing fits."""
        return EXACTNESS[EXACTNESS.index("autocast") :] if self.precision is None else (self.precision,)

    def space(self, profile: ModelProfile, cluster: ClusterSpec, precision: Exactness) -> Space:
        return compositions(
            profile, cluster, excluded=self.excluded, included=self.included, fixed=self.fixed, precision=precision
        )


def best_level(profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: Wanted) -> Ranking:
    """The ranking in the most exact numbers in which anything fits, or where nothing does in the most exact of all."""
    first: Ranking | None = None
    for level in wanted.levels:
        found = ranked(profile, start, cluster, wanted, level)
        first = first or found
        if found.fitting:
            return found
    assert first is not None, "a precision is allowed"
    return first


def ranked(profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: Wanted, precision: Exactness) -> Ranking:
    """Compositions scored, all or of many the most promising."""
    space = wanted.space(profile, cluster, precision)
    fitting, rejected = split_by_memory(_scored(space, start, cluster), cluster)
    unmet = [Rejected(strategy=Strategy((each,)), why="hardware", reason=reason) for each, reason in space.unmet]
    head, rest = _runnable(fitting, wanted.fixed)
    beyond = [
        Rejected(strategy=each.strategy, why="not run", reason="others were estimated faster", estimate=each.estimate)
        for each in rest
    ]
    return Ranking(tuple(head), (*beyond, *rejected, *unmet))


def _scored(space: Space, start: Cost, cluster: ClusterSpec) -> list[Scored]:
    leaves = list(islice(space.leaves(space.root(start)), ALL_SCORED + 1))
    if len(leaves) <= ALL_SCORED:
        return scored(leaves, cluster)
    room, host = usable_bytes(cluster), usable_host_bytes(cluster)
    found = best_first(
        space, start, cluster, device_bytes=room, host_bytes=host, keep=RUNNABLE, most=MOST_SCORED,
        most_looks=MOST_LOOKS,
    ).columns  # fmt: skip
    rows = found.fastest(RUNNABLE) or found.nearest(NEAREST)
    chosen = {Strategy(found.methods[row]) for row in rows} | _simple(space, start)
    chosen = chosen or {Strategy(each.methods) for each in islice(leaves, RUNNABLE)}
    return fastest_first(Scored(each, estimate_of(each.cost(start), cluster)) for each in chosen)


def _simple(space: Space, start: Cost) -> set[Strategy]:
    """Plain training, and what is one change away from it, where the space has that."""
    plain = complete(Strategy(), space.world_size)
    if space.follow(plain.methods, start) is None:
        return set()
    changed = (plain.with_method(choice.method) for level in space.levels for choice in level.choices)
    nodes = (space.follow(each.methods, start) for each in changed)
    return {plain, *(Strategy(node.methods) for node in nodes if node is not None)}


def _runnable(fitting: list[Scored], fixed: Strategy | None) -> tuple[list[Scored], list[Scored]]:
    """Those that dry runs are chosen from: the fastest by estimate, and the simplest."""
    kept = {*range(RUNNABLE), *simplest(fitting, fixed)[: RUNNABLE // 4]}
    return (
        [each for index, each in enumerate(fitting) if index in kept],
        [each for index, each in enumerate(fitting) if index not in kept],
    )


def gain_of_half(
    taken: Scored, profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: Wanted
) -> Iterator[str]:
    """A note of what 16-bit weights would gain on a choice that trains under autocast, where it is no tie."""
    barred = {"half", "amp_native"}.intersection(wanted.excluded or (), wanted.included or ())
    if wanted.precision not in (None, "autocast") or wanted.fixed is not None or barred:
        return
    space = wanted.space(profile, cluster, "half")
    halves = (choice.method for level in space.levels if level.kind.name == "half" for choice in level.choices)
    if "amp_native" not in taken.strategy.names() or (half := next(halves, None)) is None:
        return
    node = space.follow(taken.strategy.with_method(half).methods, start)
    if node is None:
        return
    other = estimate_of(node.cost, cluster)
    if other.needed_bytes <= usable_bytes(cluster) and other.step_s < taken.estimate.step_s * (1 - TIE):
        share = 1 - other.step_s / taken.estimate.step_s
        yield f"bf16 weights ({half}) are estimated {share:.0%} faster: precision='half' lets a search take them"


class _Row(NamedTuple):
    """A composition as it travels; without `why` it fits."""

    methods: tuple[int, ...]  # places in the table of methods
    estimate: Estimate | None
    why: Why | None = None
    reason: str = ""


@dataclass(frozen=True)
class Told:
    """A ranking in plain data."""

    methods: tuple[str, ...]  # each in its settings
    rows: tuple[_Row, ...]

    @classmethod
    def of(cls, ranking: Ranking) -> Told:
        """The part of a ranking that other processes need."""
        places: dict[str, int] = {}

        def numbered(strategy: Strategy) -> tuple[int, ...]:
            return tuple(places.setdefault(repr(each), len(places)) for each in strategy)

        rows = [_Row(numbered(each.strategy), each.estimate) for each in ranking.fitting]
        rows += [_Row(numbered(each.strategy), each.estimate, each.why, each.reason) for each in ranking.rejected]
        return cls(tuple(places), tuple(rows))

    def unknown(self, methods: Mapping[str, Method]) -> list[str]:
        """Methods that are not among a process's own `methods`."""
        return [text for text in self.methods if text not in methods]

    def ranking(self, methods: Mapping[str, Method]) -> Ranking:
        """The ranking, of a process's own `methods`, by their texts."""
        table = [methods[text] for text in self.methods]
        fitting: list[Scored] = []
        rejected: list[Rejected] = []
        for row in self.rows:
            strategy = Strategy(tuple(table[place] for place in row.methods))
            if row.why is not None:
                rejected.append(Rejected(strategy=strategy, why=row.why, reason=row.reason, estimate=row.estimate))
            elif row.estimate is not None:
                fitting.append(Scored(strategy, row.estimate))
        return Ranking(tuple(fitting), tuple(rejected))


def methods_of(space: Space) -> dict[str, Method]:
    """All methods that a ranking of a space may speak of, by their texts."""
    chosen: Sequence[Method] = [choice.method for level in space.levels for choice in level.choices]
    plain = complete(Strategy(), space.world_size)
    return {repr(each): each for each in (*plain, *chosen, *(method for method, _ in space.unmet))}
