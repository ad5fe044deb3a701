"""The tree of legal compositions of methods for a model and a machine, with what the user excludes, includes or fixes.

One level a method, in the order in which methods apply: a composition takes one of its choices or goes without. A path
from the root is a strategy, and folds its cost on the way, so that what strategies begin with in common is folded once.
Branches in which nothing legal is left end early; what is legal is said by the methods and their `agreement`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pydantic import ValidationError

from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.opt_lib.shared.mesh_constraints import disagreement, incomplete
from atorch.auto.strategy import EXACTNESS, METHODS, Exactness, Method, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES
from atorch.errors import CapabilityError, StrategyError, shown

MESH = "parallel_mode"  # the slot that several processes need


@dataclass(frozen=True, slots=True)
class Choice:
    """A method in one setting, with what the tree asks of it at every node."""

    method: Method
    splits: frozenset[str]
    needs: frozenset[str]  # names of methods that it completes
    is_given: bool = False  # by the user, who is trusted to know that it fits


@dataclass(frozen=True, slots=True)
class Level:
    """Choices of one method, or of a slot that is closed."""

    kind: type[Method]
    choices: tuple[Choice, ...]
    is_needed: bool = False  # whether no composition goes without it

    @property
    def options(self) -> tuple[Choice | None, ...]:
        """The choices, and None to go without where that may be."""
        return self.choices if self.is_needed else (*self.choices, None)


Only = Mapping[int, Collection[Choice | None]]
"""Depth of a level → those of its choices that are taken, None to go without; at other depths all."""


class SearchNode(NamedTuple):
    """A composition so far: its methods in order, and what they make of the cost."""

    depth: int
    methods: tuple[Method, ...]
    cost: Cost
    slots: frozenset[str] = frozenset()
    large: frozenset[str] = frozenset()  # axes of the mesh with several processes
    split: frozenset[str] = frozenset()  # of those, the ones that a method splits over
    lacks: frozenset[str] = frozenset()  # names of methods that others complete, and that are not there yet


@dataclass(frozen=True)
class Space:
    """The tree's levels, and the methods that this machine cannot run, with the reason."""

    levels: tuple[Level, ...]
    world_size: int = 1
    unmet: tuple[tuple[Method, str], ...] = ()
    is_checked: bool = True  # off for a strategy that is kept as the user gave it
    refused: Counter[str] = field(default_factory=Counter, compare=False)  # why branches ended, as far as they were met

    def __post_init__(self) -> None:
        # Of compositions with the same estimate the first that is met counts, in whatever order methods list choices.
        levels = (replace(each, choices=tuple(sorted(each.choices, key=_text))) for each in self.levels)
        object.__setattr__(self, "levels", tuple(levels))

    @cached_property
    def _coming(self) -> Sequence[tuple[frozenset[str], frozenset[str]]]:
        """Depth → names of the methods that may yet come, and the axes that they may split over."""
        rests = [self.levels[depth:] for depth in range(len(self.levels) + 1)]
        return [(frozenset(level.kind.name for level in rest), _split_by(*rest)) for rest in rests]

    @cached_property
    def _settled(self) -> int:
        """The depth from which on no method is party to the agreement."""
        parties = (
            level.kind.slot in (DATA_PARALLEL, MESH) or any(choice.splits or choice.needs for choice in level.choices)
            for level in self.levels
        )
        return max((depth for depth, is_party in enumerate(parties, start=1) if is_party), default=0)

    def root(self, cost: Cost) -> SearchNode:
        return SearchNode(0, (), cost)

    def leaves(self, node: SearchNode, only: Only | None = None) -> Iterator[SearchNode]:
        """All whole compositions below a node, or of these `only` some."""
        return self.descend(node, len(self.levels), only)

    def descend(self, node: SearchNode, depth: int, only: Only | None = None) -> Iterator[SearchNode]:
        """All compositions below a node that are decided down to `depth`."""
        if node.depth == depth:
            yield node
            return
        for child in self.children(node, only):
            yield from self.descend(child, depth, only)

    def follow(self, methods: Sequence[Method], cost: Cost) -> SearchNode | None:
        """The composition of exactly these methods, or None where it is not legal."""
        node = self.root(cost)
        for level in self.levels:
            wanted = next((each for each in methods if type(each) is level.kind), None)
            if wanted is None:
                following: SearchNode | None = self._without(node, level)
            elif level.kind.slot in node.slots:
                following = None
            else:
                choice = next((each for each in level.choices if each.method == wanted), _choice(wanted))
                following = self._taken(node, level, choice)
            if following is None or not self._is_open(following):
                return None
            node = following
        return node

    def children(self, node: SearchNode, only: Only | None = None) -> Iterator[SearchNode]:
        """The children of a node at the next level: with each of its choices, and without; or of these `only` some."""
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
        """The node with a choice, or None where it has nothing to do or cannot be."""
        kind, cost = level.kind, node.cost
        if self.is_checked:
            if kind.slot == DATA_PARALLEL:
                if kind.needs_replicas and node.large.isdisjoint(REPLICA_AXES):
                    return None
            elif choice.splits and node.large.isdisjoint(choice.splits):
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
            lacks = (lacks | choice.needs).difference((kind.name,), (each.name for each in node.methods))
        methods = (*node.methods, choice.method)
        return SearchNode(node.depth + 1, methods, folded, node.slots | {kind.slot}, large, split, lacks)

    def _is_open(self, node: SearchNode) -> bool:
        """True if something legal may be below."""
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
    precision: Exactness = EXACTNESS[-1],
) -> Space:
    """The space to try on devices: of methods that can be applied.

    Args:
        excluded: methods that no composition has.
        included: methods that every composition has, in any of their settings.
        fixed: every composition has exactly these methods, with the knobs that were set; knobs left unset vary.
        precision: the least exact numbers that methods may train in which are neither included nor fixed.

    Raises:
        CapabilityError: an included method cannot be applied yet.
        StrategyError: an unknown name, one that is both excluded and included, two included ones of one slot, or an
            included one that this machine cannot run.
    """
    barred, needed = names_in(excluded, "excluded"), names_in(included, "included")
    if fixed is not None:
        _check_fixed(fixed, barred, needed)
        levels = tuple(_fixed_level(each, profile, cluster) for each in fixed)
        return Space(levels, cluster.world_size, is_checked=False)
    left_out = (name for name in less_exact(precision) if name not in needed)
    space = _space(profile, cluster, (*barred, *left_out), needed, ())
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
    precision: Exactness = EXACTNESS[-1],
    host_memory: bool = True,
) -> Space:
    """The space to plan for a cluster.

    Args:
        excluded, included: as for `compositions`.
        fixed: methods that every composition has with the knobs that were set; knobs left unset vary, and so does what
            is beside them.
        precision: as for `compositions`.
        host_memory: whether methods that keep something in host memory may be used that are neither included nor fixed.

    Raises:
        StrategyError: as `compositions`.
    """
    barred, needed = names_in(excluded, "excluded"), names_in(included, "included")
    given = () if fixed is None else fixed.methods
    for each in given:
        if each.name in barred:
            raise StrategyError(f"{each.name} is both excluded and fixed; leave it out of one of them")
    chosen = {*needed, *(each.name for each in given)}
    barred = (*barred, *(name for name in less_exact(precision) if name not in chosen))
    if not host_memory:
        barred = (*barred, *(name for name in METHODS if METHODS[name].keeps_on_host and name not in chosen))
    return _space(profile, cluster, barred, needed, given)


def _space(
    profile: ModelProfile, cluster: ClusterSpec, barred: Sequence[str], needed: Sequence[str], given: Sequence[Method]
) -> Space:
    _checknames_in(barred, needed)
    held = {each.slot: each.name for each in given}
    for name in needed:
        other = held.setdefault(METHODS[name].slot, name)
        if other != name:
            raise StrategyError(f"{other} is fixed and {name} included, but they exclude each other; give one of them")
    unmet: list[tuple[Method, str]] = []
    levels = [_fixed_level(each, profile, cluster) for each in given]
    for name in METHODS:
        kind = METHODS[name]
        if name in barred or kind in map(type, given) or held.get(kind.slot, name) != name:
            continue
        level = _level(kind, profile, cluster, unmet, is_needed=name in needed)
        if level is not None:
            levels.append(level)
    levels.sort(key=lambda level: (level.kind.phase, level.kind.name))
    return Space(tuple(levels), cluster.world_size, tuple(unmet))


def _level(
    kind: type[Method],
    profile: ModelProfile,
    cluster: ClusterSpec,
    unmet: list[tuple[Method, str]],
    *,
    is_needed: bool,
) -> Level | None:
    """A kind's choices that the machine can run; the others go to `unmet`. None where there is no choice."""
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


def _fixed_level(given: Method, profile: ModelProfile, cluster: ClusterSpec) -> Level:
    """The given method, and its kind's choices with the knobs that were given."""
    variants: list[Method] = [given]
    for choice in type(given).choices(profile, cluster):
        variant = _with_knobs_of(given, choice)
        if variant is not None and variant not in variants and _why_not(variant, cluster) is None:
            variants.append(variant)
    return Level(type(given), tuple(_choice(each, is_given=each is given) for each in variants), is_needed=True)


def _split_by(*levels: Level) -> frozenset[str]:
    return frozenset[str]().union(*(choice.splits for level in levels for choice in level.choices))


def _text(choice: Choice) -> str:
    return str(choice.method)


def _choice(method: Method, *, is_given: bool = False) -> Choice:
    return Choice(method, frozenset(method.splits), frozenset(method.needs), is_given)


def _with_knobs_of(given: Method, choice: Method) -> Method | None:
    """The choice under the knobs that were set; None where it contradicts them, as a count does a set size."""
    knobs = {knob: getattr(each, knob) for each in (choice, given) for knob in each.model_fields_set}
    try:
        return type(given)(**knobs)
    except ValidationError:
        return None


def less_exact(precision: Exactness) -> tuple[str, ...]:
    """Names of the methods that train in less exact numbers."""
    allowed = EXACTNESS.index(precision)
    return tuple(name for name in METHODS if EXACTNESS.index(METHODS[name].exactness) > allowed)


def names_in(given: Iterable[str] | None, argument: str) -> tuple[str, ...]:
    """The methods that an argument names; raises StrategyError for a text, and for a name that there is not."""
    if isinstance(given, str):
        raise StrategyError(f"{argument} is {given!r}; give a list of method names, [{given!r}]")
    if given is not None and not isinstance(given, Iterable):
        raise StrategyError(f"{argument} is {shown(given)}; give a list of method names, as ['fsdp']")
    names = tuple(given or ())
    for name in names:
        if not isinstance(name, str):
            raise StrategyError(
                f"{argument} has {shown(name)}; it has names of methods alone, as ['fsdp']. A method with its settings "
                "goes into load_strategy, where finetune_strategy=True searches the settings that are left"
            )
        METHODS[name]
    return names


def _checknames_in(barred: Sequence[str], needed: Sequence[str]) -> None:
    both = sorted(set(barred) & set(needed))
    if both:
        raise StrategyError(f"{both[0]} is both excluded and included; leave it out of one of them")
    slots: dict[str, str] = {}
    for name in dict.fromkeys(needed):
        slot = METHODS[name].slot
        if slot in slots:
            raise StrategyError(f"{slots[slot]} and {name} are both included, but exclude each other; include one")
        slots[slot] = name


def _check_fixed(fixed: Strategy, barred: Sequence[str], needed: Sequence[str]) -> None:
    for name in barred:
        if name in fixed.names():
            raise StrategyError(f"{name} is excluded, but the strategy to be tuned has it; leave it out of one of them")
    for name in needed:
        if name not in fixed.names():
            raise StrategyError(f"{name} is included, but tuning a strategy keeps its methods; add {name} to it")


def _why_not(choice: Method, cluster: ClusterSpec) -> str | None:
    try:
        return choice.unmet(cluster)
    except CapabilityError as error:
        return str(error)
