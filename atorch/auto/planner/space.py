"""The tree of legal compositions of methods for a model and a machine, within the user's excluded and fixed methods.

Every method has a level, in the order in which methods apply: a composition has one of its choices or none. A path from
the root is a strategy and accumulates its cost, so the common beginning of strategies is computed once. A branch ends
when nothing legal is left; the methods and `defaults` decide on that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pydantic import ValidationError

from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.opt_lib.shared.defaults import disagreement, incomplete
from atorch.auto.planner.request import check_names, less_exact, names_in, others
from atorch.auto.strategy import METHODS, PRECISIONS, Method, PrecisionLevel, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES
from atorch.errors import CapabilityError, StrategyError
from atorch.trainer_configs import target

MESH = "parallel_mode"  # the slot that several processes need


@dataclass(frozen=True, slots=True)
class Choice:
    """A method in one setting, with its properties that every node uses."""

    method: Method
    splits: frozenset[str]
    needs: frozenset[str]  # names of methods that it completes
    is_given: bool = False  # given by the user; without `Space.is_checked` it is not checked


@dataclass(frozen=True, slots=True)
class Level:
    kind: type[Method]
    choices: tuple[Choice, ...]
    is_needed: bool = False  # True if every composition has one of the choices

    @property
    def options(self) -> tuple[Choice | None, ...]:
        return self.choices if self.is_needed else (*self.choices, None)


Only = Mapping[int, Collection[Choice | None]]
"""Depth of a level → the choices to consider, None for no method; at other depths all are considered."""


class SearchNode(NamedTuple):
    """A partial composition: its methods in order, and the cost with them."""

    depth: int
    methods: tuple[Method, ...]
    cost: Cost
    slots: frozenset[str] = frozenset()
    large: frozenset[str] = frozenset()  # axes of the mesh with several processes
    split: frozenset[str] = frozenset()  # axes that a method splits over
    lacks: frozenset[str] = frozenset()  # names of methods that others need and that are still missing


@dataclass(frozen=True)
class Space:
    """The tree's levels, and the methods that this machine cannot run, with the reasons."""

    levels: tuple[Level, ...]
    world_size: int = 1
    unmet: tuple[tuple[Method, str], ...] = ()
    is_checked: bool = True  # False for a strategy that is kept as the user gave it
    target: str | None = None  # the trainer that has to express every composition
    refused: Counter[str] = field(default_factory=Counter, compare=False)  # reasons why visited branches ended

    def __post_init__(self) -> None:
        # The first of equally estimated compositions wins, so the order must not depend on the methods' lists.
        ordered = (tuple(sorted(level.choices, key=lambda choice: str(choice.method))) for level in self.levels)
        levels = (replace(level, choices=choices) for level, choices in zip(self.levels, ordered, strict=True))
        object.__setattr__(self, "levels", tuple(levels))

    @cached_property
    def _coming(self) -> Sequence[tuple[frozenset[str], frozenset[str]]]:
        """Depth → names of the methods of later levels, and the axes that they may split over."""
        rests = [self.levels[depth:] for depth in range(len(self.levels) + 1)]
        names = [frozenset(level.kind.name for level in rest) for rest in rests]
        choices = [[choice for level in rest for choice in level.choices] for rest in rests]
        axes = [frozenset(axis for choice in later for axis in choice.splits) for later in choices]
        return list(zip(names, axes, strict=True))

    @cached_property
    def _settled(self) -> int:
        """The first depth from which no method affects the match of methods and mesh."""
        parties = (
            level.kind.slot in (DATA_PARALLEL, MESH) or any(choice.splits or choice.needs for choice in level.choices)
            for level in self.levels
        )
        return max((depth for depth, is_party in enumerate(parties, start=1) if is_party), default=0)

    @cached_property
    def _lacks(self) -> Callable[[Strategy], Sequence[str]] | None:
        """A function that says what the target lacks of a composition, or of a part of one."""
        return None if self.target is None else target(self.target).lacks

    def root(self, cost: Cost) -> SearchNode:
        return SearchNode(0, (), cost)

    def leaves(self, node: SearchNode, only: Only | None = None) -> Iterator[SearchNode]:
        return self.descend(node, len(self.levels), only)

    def descend(self, node: SearchNode, depth: int, only: Only | None = None) -> Iterator[SearchNode]:
        """All partial compositions below a node at `depth`, limited to `only`."""
        if node.depth == depth:
            yield node
            return
        for child in self.children(node, only):
            yield from self.descend(child, depth, only)

    def follow(self, methods: Sequence[Method], cost: Cost) -> SearchNode | None:
        """The composition of exactly these methods, or None if it is not legal."""
        node = self.root(cost)
        for level in self.levels:
            wanted = next((method for method in methods if type(method) is level.kind), None)
            if wanted is None:
                following: SearchNode | None = self._without(node, level)
            elif level.kind.slot in node.slots:
                following = None
            else:
                choice = next((option for option in level.choices if option.method == wanted), _choice(wanted))
                following = self._taken(node, level, choice)
            if following is None or not self._is_open(following):
                return None
            node = following
        return node

    def children(self, node: SearchNode, only: Only | None = None) -> Iterator[SearchNode]:
        """The legal children of a node: with each choice of the next level, and without one; limited to `only`."""
        level = self.levels[node.depth]
        among = level.options if only is None else only.get(node.depth, level.options)
        for choice in among if level.kind.slot not in node.slots else (None,) if None in among else ():
            taken = self._without(node, level) if choice is None else self._taken(node, level, choice)
            if taken is not None and self._is_open(taken):
                yield taken

    def _without(self, node: SearchNode, level: Level) -> SearchNode | None:
        if level.is_needed or (self.is_checked and self.world_size > 1 and level.kind.slot == MESH):
            return None
        return SearchNode(node.depth + 1, node.methods, node.cost, node.slots, node.large, node.split, node.lacks)

    def _taken(self, node: SearchNode, level: Level, choice: Choice) -> SearchNode | None:
        """The child with a choice, or None if the choice has no effect or is not legal."""
        kind, cost = level.kind, node.cost
        if self.is_checked:
            over: Collection[str] = choice.splits
            if kind.slot == DATA_PARALLEL:
                over = REPLICA_AXES if kind.needs_replicas else ()
            if over and node.large.isdisjoint(over):
                if level.is_needed:
                    self.refused[f"{kind.name} has no axis of several processes to share out over"] += 1
                return None
        if self.is_checked or not choice.is_given:
            reason = choice.method.unfit(cost)
            if reason is not None:
                self.refused[reason] += 1
                return None
        folded = choice.method.cost(cost)
        large = node.large
        if folded.axes is not cost.axes:
            large = frozenset(name for name, size in folded.axes.items() if size > 1)
        split = node.split | choice.splits if choice.splits else node.split
        lacks = node.lacks
        if choice.needs or lacks:
            lacks = (lacks | choice.needs).difference((kind.name,), (method.name for method in node.methods))
        methods = (*node.methods, choice.method)
        if self._lacks is not None and (reasons := self._lacks(Strategy(methods))):
            self.refused[reasons[0]] += 1
            return None
        return SearchNode(node.depth + 1, methods, folded, node.slots | {kind.slot}, large, split, lacks)

    def _is_open(self, node: SearchNode) -> bool:
        """True if a complete composition below may be legal."""
        if not self.is_checked:
            return True
        names, axes = self._coming[node.depth]
        if node.lacks and not node.lacks <= names:
            self.refused[incomplete(node.methods) or ""] += 1
            return False
        if not node.large <= node.split | axes | {"data"}:
            return False
        if node.depth != self._settled:
            return True
        reason = disagreement(node.methods, node.cost.axes)
        if reason is None and self.world_size > 1 and MESH not in node.slots:
            reason = f"{self.world_size} processes need a mesh"
        if reason is not None:
            self.refused[reason] += 1
        return reason is None


def compositions(
    profile: ModelProfile,
    cluster: ClusterSpec,
    *,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
    precision: PrecisionLevel = PRECISIONS[-1],
) -> Space:
    """The space of compositions to try on the job's own devices.

    Args:
        excluded: methods that no composition has.
        included: methods that every composition has, in any of their settings.
        fixed: every composition has exactly these methods, with the knobs that were set; knobs left unset vary.
        precision: the lowest precision of methods that are neither included nor fixed.

    Raises:
        CapabilityError: an included method cannot be applied yet.
        StrategyError: an unknown or contradictory name, or an included method that this machine cannot run.
    """
    for name in (*names_in(included, "included"), *(() if fixed is None else fixed.names())):
        if METHODS[name].planned_only:
            raise CapabilityError(
                f"{name} is only for plans: no program applies it yet; leave it out, or plan with it for a cluster "
                f"(atorch plan --include {name})"
            )
    if fixed is not None:
        check_names(names_in(excluded, "excluded"), names_in(included, "included"), fixed, is_whole=True)
        levels = tuple(_fixed_level(method, profile, cluster) for method in fixed)
        return Space(levels, cluster.world_size, is_checked=False)
    space = plannable(profile, cluster, excluded=excluded, included=included, precision=precision)
    for slot in (MESH, DATA_PARALLEL) if cluster.world_size > 1 else ():
        if not any(level.choices for level in space.levels if level.kind.slot == slot):
            names = [name for name in METHODS if METHODS[name].slot == slot]
            raise StrategyError(
                f"everything for the slot {slot} is excluded, but {cluster.world_size} processes need one of "
                f"{', '.join(names)}"
            )
    return space


def plannable(
    profile: ModelProfile,
    cluster: ClusterSpec,
    *,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
    extend: Strategy | None = None,
    precision: PrecisionLevel = PRECISIONS[-1],
    host_memory: bool = True,
    target: str | None = None,
) -> Space:
    """The space of compositions to plan for a cluster.

    Args:
        excluded, included: as for `compositions`.
        fixed: the methods that every composition has, and no others; knobs left unset vary. Several processes get a
            mesh where it has none, and ddp where it has no data-parallel method.
        extend: methods that every composition has, among others; knobs left unset vary.
        precision: as for `compositions`.
        host_memory: allow methods that use host memory; those that are included or fixed are always allowed.
        target: the trainer whose configuration has to express the composition.

    Raises:
        StrategyError: as `compositions`.
    """
    barred, needed = names_in(excluded, "excluded"), names_in(included, "included")
    if fixed is not None and extend is not None:
        raise StrategyError(
            "fixed and extend are both given; fixed is for exactly its methods, extend for more. Give one"
        )
    strategy = fixed if extend is None else extend
    held = check_names(barred, needed, strategy, is_whole=fixed is not None)
    given = () if strategy is None else strategy.methods
    barred = (*barred, *less_exact(precision), *(() if fixed is None else others(fixed)))
    if not host_memory:
        barred = (*barred, *(name for name in METHODS if METHODS[name].keeps_on_host))
    unmet: list[tuple[Method, str]] = []
    levels = [_fixed_level(method, profile, cluster) for method in given]
    for name in METHODS:
        kind, is_needed = METHODS[name], name in needed
        is_other = kind in map(type, given) or held.get(kind.slot, name) != name
        if is_other or ((name in barred or kind.planned_only) and not is_needed):
            continue
        level = _level(kind, profile, cluster, unmet, is_needed=is_needed)
        if level is not None:
            levels.append(level)
    levels.sort(key=lambda level: (level.kind.phase, level.kind.name))
    return Space(tuple(levels), cluster.world_size, tuple(unmet), target=target)


def with_settings(space: Space, strategy: Strategy) -> Space:
    """The space with the settings of a strategy among its choices, so that `Space.follow` keeps each of its methods."""
    levels = {level.kind: level for level in space.levels}
    for method in strategy:
        level = levels.get(type(method), Level(type(method), ()))
        if method not in [choice.method for choice in level.choices]:
            levels[type(method)] = replace(level, choices=(*level.choices, _choice(method)))
    ordered = sorted(levels.values(), key=lambda level: (level.kind.phase, level.kind.name))
    return replace(space, levels=tuple(ordered), refused=Counter())


def refusals(strategy: Strategy, cost: Cost, cluster: ClusterSpec) -> tuple[str, ...]:
    """Reasons why atorch would not train so, beginning with a step's `cost` without any method."""
    reasons = []
    for method in strategy:
        reasons += [reason for reason in (_why_not(method, cluster), method.unfit(cost)) if reason is not None]
        cost = method.cost(cost)
    unmatched = disagreement(strategy.methods, cost.axes)
    return (*reasons, *([] if unmatched is None else [unmatched]))


def _level(
    kind: type[Method], profile: ModelProfile, cluster: ClusterSpec, unmet: list[tuple[Method, str]], *, is_needed: bool
) -> Level | None:
    """The level of a kind's choices that the machine can run; adds the others to `unmet`. None if there are none."""
    choices = list(kind.choices(profile, cluster))
    if is_needed and not choices:
        choices = [kind.of()]
    able: list[Choice] = []
    for method in choices:
        reason = _why_not(method, cluster)
        if reason is None:
            able.append(_choice(method))
        else:
            unmet.append((method, reason))
    if is_needed and not able:
        raise StrategyError(f"{kind.name} is included, but this machine cannot run it: {unmet[-1][1]}")
    return Level(kind, tuple(able), is_needed) if able else None


def _fixed_level(fixed: Method, profile: ModelProfile, cluster: ClusterSpec) -> Level:
    """The level of the fixed method, and of its kind's choices with its knobs."""
    variants: list[Method] = [fixed]
    for choice in type(fixed).choices(profile, cluster):
        variant = _with_knobs_of(fixed, choice)
        if variant is not None and variant not in variants and _why_not(variant, cluster) is None:
            variants.append(variant)
    choices = tuple(_choice(variant, is_given=variant is fixed) for variant in variants)
    return Level(type(fixed), choices, is_needed=True)


def _choice(method: Method, *, is_given: bool = False) -> Choice:
    return Choice(method, frozenset(method.splits), frozenset(method.needs), is_given)


def _with_knobs_of(fixed: Method, choice: Method) -> Method | None:
    """The choice with the fixed knobs; None if it contradicts them."""
    knobs = {knob: getattr(source, knob) for source in (choice, fixed) for knob in source.model_fields_set}
    try:
        return type(fixed)(**knobs)
    except ValidationError:
        return None


def _why_not(choice: Method, cluster: ClusterSpec) -> str | None:
    try:
        return choice.unmet(cluster)
    except CapabilityError as error:
        return str(error)
