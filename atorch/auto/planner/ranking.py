"""Compositions for dry runs: those that fit, the fastest by estimate first, and the reasons against the others.

A small space is scored completely. A large one has tens of thousands of compositions on a thousand devices; there
bounds lead to the fastest (`best_first`), and the simplest are added. Either way some hundreds are left, so a search's
memory does not grow with the cluster. Only rank 0 computes the ranking. It broadcasts methods as texts, since a user's
method may be of a class that cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.best_first import best_first
from atorch.auto.planner.candidate_table import TIE
from atorch.auto.planner.estimate import estimate_of, needs, usable_bytes, usable_host_bytes
from atorch.auto.planner.plan import Rejected, Scored
from atorch.auto.planner.space import Space, compositions
from atorch.auto.strategy import METHODS, PRECISIONS, Method, Phase, PrecisionLevel, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.distributed.mesh import BATCH_AXES

ALL_SCORED = 2_000  # largest space that is scored completely; of a larger one, bounds choose compositions
MOST_SCORED = 4_000
MOST_LOOKS = 10_000  # visits of branches of the tree
RUNNABLE = 400  # compositions that dry runs are chosen from, and a quarter as many simple ones
NEAREST = 20  # compositions that are reported if nothing fits


@dataclass(frozen=True)
class Ranking:
    """A ranking by estimate: the compositions that fit, the fastest first, and the rejected ones."""

    fitting: tuple[Scored, ...]
    rejected: tuple[Rejected, ...]

    @property
    def num_compositions(self) -> int:
        """The number of compositions that were scored and that this machine can run, whether they fit or not."""
        return len(self.fitting) + sum(rejected.why != "hardware" for rejected in self.rejected)


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """The user's limits on the space of a search: see `space.compositions`.

    precision: the lowest precision; None for autocast, and for lower ones only if nothing else fits.
    """

    excluded: Iterable[str] | None = None
    included: Iterable[str] | None = None
    fixed: Strategy | None = None
    precision: PrecisionLevel | None = None

    @property
    def levels(self) -> tuple[PrecisionLevel, ...]:
        """The allowed precision, followed by less exact ones for the case that nothing fits."""
        return PRECISIONS[PRECISIONS.index("autocast") :] if self.precision is None else (self.precision,)

    def space(self, profile: ModelProfile, cluster: ClusterSpec, precision: PrecisionLevel) -> Space:
        return compositions(
            profile, cluster, excluded=self.excluded, included=self.included, fixed=self.fixed, precision=precision
        )


def best_level(profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: SearchLimits) -> Ranking:
    """The ranking for the most exact numbers in which anything fits, or for the most exact of all if nothing does."""
    first: Ranking | None = None
    for level in wanted.levels:
        ranking = ranked(profile, start, cluster, wanted, level)
        first = first or ranking
        if ranking.fitting:
            return ranking
    assert first is not None, "a precision is allowed"
    return first


def ranked(
    profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: SearchLimits, precision: PrecisionLevel
) -> Ranking:
    """The ranking of all compositions, or of the most promising in a large space."""
    space = wanted.space(profile, cluster, precision)
    limit, candidates = usable_bytes(cluster), _scored(space, start, cluster)
    fitting = [entry for entry in candidates if entry.estimate.needed_bytes <= limit]
    too_large = [
        entry.rejected("memory", needs(entry.estimate, limit))
        for entry in candidates
        if entry.estimate.needed_bytes > limit
    ]
    unmet = [Rejected(strategy=Strategy((method,)), why="hardware", reason=reason) for method, reason in space.unmet]
    kept = {*range(RUNNABLE), *simplest(fitting, wanted.fixed)[: RUNNABLE // 4]}
    beyond = [fitting[index] for index in range(len(fitting)) if index not in kept]
    rest = [other.rejected("not run", "others were estimated faster") for other in beyond]
    return Ranking(tuple(entry for index, entry in enumerate(fitting) if index in kept), (*rest, *too_large, *unmet))


def _scored(space: Space, start: Cost, cluster: ClusterSpec) -> list[Scored]:
    leaves = list(islice(space.leaves(space.root(start)), ALL_SCORED + 1))
    if len(leaves) <= ALL_SCORED:
        return _fastest_first(Scored(Strategy(leaf.methods), estimate_of(leaf.cost, cluster)) for leaf in leaves)
    room, host = usable_bytes(cluster), usable_host_bytes(cluster)
    table = best_first(
        space, start, cluster, device_bytes=room, host_bytes=host, keep=RUNNABLE, most=MOST_SCORED,
        most_looks=MOST_LOOKS,
    ).columns  # fmt: skip
    rows = table.fastest(RUNNABLE) or table.nearest(NEAREST)
    chosen = {Strategy(table.methods[row]) for row in rows} | _simple(space, start)
    chosen = chosen or {Strategy(leaf.methods) for leaf in islice(leaves, RUNNABLE)}
    return _fastest_first(Scored(strategy, estimate_of(strategy.cost(start), cluster)) for strategy in chosen)


def _fastest_first(candidates: Iterable[Scored]) -> list[Scored]:
    return sorted(candidates, key=lambda entry: (entry.estimate.step_s, entry.estimate.peak_bytes, str(entry.strategy)))


def _simple(space: Space, start: Cost) -> set[Strategy]:
    """Plain training and the compositions one change away from it, if the space has them."""
    plain = complete(Strategy(), space.world_size)
    if space.follow(plain.methods, start) is None:
        return set()
    changed = (plain.with_method(choice.method) for level in space.levels for choice in level.choices)
    nodes = (space.follow(strategy.methods, start) for strategy in changed)
    return {plain, *(Strategy(node.methods) for node in nodes if node is not None)}


def simplest(candidates: Sequence[Scored], requested: Strategy | None = None) -> list[int]:
    """The candidates in order, the baseline first.

    The baseline is `requested`, a strategy with knobs to search, or the code of a careful user: plain training on one
    process, `ddp` on several. If that does not fit, it is the composition that is estimated fastest among the equally
    exact ones without compiler and without split model.
    """

    def simplicity(index: int) -> tuple[bool, int, bool, int, bool, float, int]:
        strategy = candidates[index].strategy
        extras = len(_extras(strategy))
        seconds = candidates[index].estimate.step_s
        is_other = requested is None or strategy != requested
        split = {axis for method in strategy for axis in method.splits}.difference(BATCH_AXES)
        level = max((PRECISIONS.index(method.precision_level) for method in strategy), default=0)
        return is_other, level, compiles(strategy), len(split), extras > 0, seconds, extras

    return sorted(range(len(candidates)), key=simplicity)


def compiles(strategy: Strategy) -> bool:
    return any(method.phase == Phase.COMPILE for method in strategy)


def _extras(strategy: Strategy) -> list[Method]:
    """Methods in addition to plain training on these processes."""
    mode = strategy.get(ParallelMode)
    rest: list[Method] = [method for method in strategy if not isinstance(method, (ParallelMode, Ddp))]
    return rest if mode is None or mode.size("data") == mode.size(*dict(mode.slices)) else [*rest, mode]


def gain_of_half(
    taken: Scored, profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: SearchLimits
) -> Iterator[str]:
    """A note on the gain of 16-bit weights over a choice that trains under autocast, unless it is a tie."""
    named = {METHODS[name].precision_level for name in (*(wanted.excluded or ()), *(wanted.included or ()))}
    if wanted.precision not in (None, "autocast") or wanted.fixed is not None or named & {"autocast", "half"}:
        return
    space = wanted.space(profile, cluster, "half")
    halves = (
        choice.method for level in space.levels if level.kind.precision_level == "half" for choice in level.choices
    )
    if not taken.strategy.uses("autocast") or (half := next(halves, None)) is None:
        return
    node = space.follow(taken.strategy.with_method(half).methods, start)
    if node is None:
        return
    other = estimate_of(node.cost, cluster)
    if other.needed_bytes <= usable_bytes(cluster) and other.step_s < taken.estimate.step_s * (1 - TIE):
        share = 1 - other.step_s / taken.estimate.step_s
        yield f"bf16 weights ({half}) are estimated {share:.0%} faster: precision='half' lets a search take them"


@dataclass(frozen=True)
class RankingSummary:
    """A ranking for the broadcast, with texts of methods in the place of strategies."""

    methods: tuple[str, ...]  # with their settings
    strategies: tuple[tuple[int, ...], ...]  # indices of the methods of each entry
    entries: tuple[Scored | Rejected, ...]

    @classmethod
    def of(cls, ranking: Ranking) -> RankingSummary:
        """The data of a ranking for the other processes."""
        places: dict[str, int] = {}
        entries: tuple[Scored | Rejected, ...] = (*ranking.fitting, *ranking.rejected)
        strategies = tuple(
            tuple(places.setdefault(repr(method), len(places)) for method in entry.strategy) for entry in entries
        )
        return cls(tuple(places), strategies, tuple(replace(entry, strategy=Strategy()) for entry in entries))

    def unknown(self, methods: Mapping[str, Method]) -> list[str]:
        return [text for text in self.methods if text not in methods]

    def ranking(self, methods: Mapping[str, Method]) -> Ranking:
        """The ranking with this process's `methods`, a map from texts."""
        table = [methods[text] for text in self.methods]
        strategies = (Strategy(tuple(table[place] for place in places)) for places in self.strategies)
        entries = [replace(entry, strategy=own) for entry, own in zip(self.entries, strategies, strict=True)]
        fitting = tuple(entry for entry in entries if isinstance(entry, Scored))
        return Ranking(fitting, tuple(entry for entry in entries if isinstance(entry, Rejected)))


def methods_of(space: Space) -> dict[str, Method]:
    """Text → method, for all methods that may occur in a ranking of the space."""
    chosen: Sequence[Method] = [choice.method for level in space.levels for choice in level.choices]
    plain = complete(Strategy(), space.world_size)
    return {repr(method): method for method in (*plain, *chosen, *(unmet for unmet, _ in space.unmet))}
