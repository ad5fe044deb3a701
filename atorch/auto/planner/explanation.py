"""Explanations of a plan: neighbours of the choice, one change away, each with its loss and the reason.

A neighbour has another method or none in one slot, or a mesh in which one axis has another size. Then another axis
compensates, and methods that split over an axis are added or removed with it. If a neighbour's micro-batches do not
divide its batch, the fastest that do are used.

If nothing fits, changes are listed that make the job fit, each verified by a search.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from atorch.auto.planner.candidate_table import CandidateTable
from atorch.auto.planner.estimate import estimate_of, needs
from atorch.auto.planner.plan import Counterfactual, Estimate
from atorch.auto.planner.request import EXPERTS, PlanJob
from atorch.auto.planner.space import MESH, Level, SearchNode, Space
from atorch.auto.strategy import PRECISIONS, Method
from atorch.cost import Cost, ModelProfile, Segment, StepTimes, peak_memory
from atorch.units import format_bytes, format_seconds

STEP = "micro_batch"  # the slot that is adapted if the batch no longer divides
NEIGHBOURS = 2  # number of smaller and of larger sizes that are considered for each axis

MethodTuple = tuple[Method, ...]


@dataclass(frozen=True)
class MemoryLimits:
    device_bytes: float
    host_bytes: float

    def short(self, estimate: Estimate) -> str | None:
        if estimate.needed_bytes > self.device_bytes:
            return needs(estimate, self.device_bytes)
        if estimate.on_host_bytes > self.host_bytes:
            held, short = estimate.on_host_bytes, estimate.on_host_bytes - self.host_bytes
            return f"is {format_bytes(short)} short of the {format_bytes(held)} of host memory that a device needs"
        return None

    def order(self, estimate: Estimate) -> tuple[bool, float]:
        """A key that sorts by seconds what fits, and then the rest by the bytes that it needs."""
        is_short = self.short(estimate) is not None
        return is_short, estimate.needed_bytes if is_short else estimate.step_s


def counterfactuals(
    space: Space, chosen: MethodTuple, start: Cost, limits: MemoryLimits, columns: CandidateTable, times: StepTimes
) -> tuple[Counterfactual, ...]:
    """The neighbours, the fastest first, then those that do not fit; the best of each change.

    Neighbours that `columns` lacks are added to it.
    """
    look = _Look(space, chosen, start, limits, columns, set(columns.methods), times)
    base = look.scored(chosen)
    assert base is not None, "the chosen composition is legal"
    return tuple(_counterfactual(change, base[1], limits) for change in _changes(look))


def single_changes(
    space: Space, chosen: MethodTuple, start: Cost, limits: MemoryLimits, times: StepTimes
) -> tuple[Change, ...]:
    """The neighbours of a composition, which need not be legal itself, in the order of `counterfactuals`."""
    columns = CandidateTable(limits.device_bytes, limits.host_bytes)
    return _changes(_Look(space, chosen, start, limits, columns, set(), times))


def _changes(look: _Look) -> tuple[Change, ...]:
    best: dict[tuple[str, str], Change] = {}
    for what, name, methods in look.neighbours():
        scored = look.scored(methods)
        if scored is not None:
            change = Change(name, what, *scored)
            best[what, name] = min(best.get((what, name), change), change, key=look.order)
    return tuple(sorted(best.values(), key=look.order))


@dataclass(frozen=True)
class Change:
    """One change of a strategy, with the methods and the estimate after it."""

    change: str
    what: str
    methods: MethodTuple
    estimate: Estimate


def _counterfactual(change: Change, base: Estimate, limits: MemoryLimits) -> Counterfactual:
    short = limits.short(change.estimate)
    ratio = change.estimate.step_s / base.step_s if short is None else None
    why = short or _why(base, change.estimate)
    return Counterfactual(what=change.what, change=change.change, ratio=ratio, reason=why)


def _why(base: Estimate, estimate: Estimate) -> str:
    """The change of the category of time that changes most in the same direction as the step."""
    grown = {name: estimate.time.get(name, 0.0) - base.time.get(name, 0.0) for name in {**base.time, **estimate.time}}
    is_slower = estimate.step_s >= base.step_s
    name = (max if is_slower else min)(sorted(grown), key=lambda category: grown[category])
    if abs(grown[name]) < 1e-3 * base.step_s:
        return f"the same work, and {format_bytes(estimate.peak_bytes)} instead of {format_bytes(base.peak_bytes)}"
    verb = "grows" if is_slower else "shrinks"
    return f"{_NAMES.get(name, name)} {verb} by {format_seconds(abs(grown[name]))}"


_NAMES: Mapping[str, str] = {
    "matmul": "time in matmuls",
    "traffic": "time in memory traffic",
    "launch": "time in launches",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer's step",
    "exposed_comm": "exposed communication",
    "offload": "waiting for host memory",
    "extra": "other time",
}


@dataclass(frozen=True)
class _Look:
    space: Space
    chosen: MethodTuple
    start: Cost
    limits: MemoryLimits
    columns: CandidateTable
    known: set[MethodTuple]
    times: StepTimes

    def neighbours(self) -> Iterator[tuple[str, str, MethodTuple]]:
        """`(what, change, methods)` of all neighbours; several for a change that can be compensated in several ways."""
        for level in self.space.levels:
            if level.kind.slot == MESH:
                yield from self._meshes(level)
            else:
                yield from self._others(level)

    def order(self, change: Change) -> tuple[bool, float]:
        return self.limits.order(change.estimate)

    def scored(self, methods: MethodTuple) -> tuple[MethodTuple, Estimate] | None:
        """A composition and its estimate, with other micro-batches if these do not divide; None if it is not legal."""
        node = self.space.follow(methods, self.start)
        if node is not None:
            return self._scored(node)
        mesh, cut = _in_slot(self.chosen, MESH), _in_slot(self.chosen, STEP)
        if _in_slot(methods, MESH) == mesh and _in_slot(methods, STEP) != cut:
            return None  # the neighbour's change is the cut itself
        estimates = [self._scored(node) for node in self._recut(methods)]
        return min(estimates, key=lambda scored: self.limits.order(scored[1]), default=None)

    def _scored(self, node: SearchNode) -> tuple[MethodTuple, Estimate]:
        estimate = estimate_of(node.cost, self.times.cluster, self.times)
        if node.methods not in self.known:
            self.known.add(node.methods)
            self.columns.add(node.methods, estimate.step_s, peak_memory(node.cost))
        return node.methods, estimate

    def _recut(self, methods: MethodTuple) -> Iterator[SearchNode]:
        kept = tuple(method for method in methods if method.slot != STEP)
        for level in self.space.levels:
            if level.kind.slot == STEP:
                for cut in (kept, *((*kept, choice.method) for choice in level.choices)):
                    node = self.space.follow(cut, self.start)
                    if node is not None:
                        yield node

    def _others(self, level: Level) -> Iterator[tuple[str, str, MethodTuple]]:
        """Replace the method in the level's slot by another setting, or remove it."""
        held = _in_slot(self.chosen, level.kind.slot)
        rest = tuple(method for method in self.chosen if method is not held)
        for choice in level.choices:
            if choice.method != held:
                change = f"with {choice.method}" if held is None else f"{choice.method} instead of {held}"
                yield choice.method.name, change, (*rest, choice.method)
        if held is not None and type(held) is level.kind:
            yield held.name, f"without {held}", rest

    def _meshes(self, level: Level) -> Iterator[tuple[str, str, MethodTuple]]:
        """Meshes with the next sizes of each axis, for which one other axis compensates."""
        held = _in_slot(self.chosen, MESH)
        if held is None:
            return
        rest = tuple(method for method in self.chosen if method is not held)
        mine = held.cost(self.start).axes
        meshes = [(choice.method, choice.method.cost(self.start).axes) for choice in level.choices]
        for axis in sorted({name for _, sizes in meshes for name in sizes} - {"data"}):  # data compensates
            size = mine.get(axis, 1)
            alike = [
                (mesh, sizes)
                for mesh, sizes in meshes
                if sizes.get(axis, 1) != size and len(_apart(sizes, mine)) <= 2 and axis in _apart(sizes, mine)
            ]
            others = sorted({sizes.get(axis, 1) for _, sizes in alike})
            near = [other for other in others if other < size][-NEIGHBOURS:]
            near += [other for other in others if other > size][:NEIGHBOURS]
            for mesh, sizes in alike:
                if sizes.get(axis, 1) in near:
                    yield axis, f"{axis} {sizes.get(axis, 1)}", (mesh, *self._adapted(rest, sizes))

    def _adapted(self, rest: MethodTuple, sizes: Mapping[str, int]) -> MethodTuple:
        """The other methods for a mesh: without those that lost their axis, with a method for each new axis."""
        large = {name for name, size in sizes.items() if size > 1}
        kept = [
            method
            for method in rest
            if not method.splits or method.needs_replicas or not large.isdisjoint(method.splits)
        ]
        names = {method.name for method in kept}
        kept = [method for method in kept if names.issuperset(method.needs)]
        split = {axis for method in kept for axis in method.splits} | {"data"}
        for level in self.space.levels:
            for choice in level.choices:
                is_new = choice.splits & large - split and level.kind.slot not in {method.slot for method in kept}
                if is_new and choice.splits <= large:
                    kept.append(choice.method)
                    split |= choice.splits
        return tuple(kept)


def _in_slot(methods: MethodTuple, slot: str) -> Method | None:
    return next((method for method in methods if method.slot == slot), None)


def _apart(one: Mapping[str, int], other: Mapping[str, int]) -> Sequence[str]:
    return [name for name in {**one, **other} if one.get(name, 1) != other.get(name, 1)]


MOST = 3  # limit of listed remedies
FACTORS = (2, 4, 8, 16, 32, 64)  # of more nodes, or of a smaller batch or sequence

J = TypeVar("J", bound=PlanJob)


def remedies(job: J, fits: Callable[[J], bool]) -> tuple[str, ...]:
    """Changes of which each alone makes the job fit, the cheapest first, at most three."""
    ways = (_allowed(job), _smaller_batches(job), _shorter_sequences(job), _larger_clusters(job), _experts(job))
    advice = (next((text for text, changed in way if fits(changed)), None) for way in ways)
    return tuple(itertools.islice((text for text in advice if text is not None), MOST))


def _allowed(job: J) -> Iterator[tuple[str, J]]:
    """Allow an excluded method, host memory, or 16-bit parameters."""
    request = job.request
    for name in request.excluded:
        rest = tuple(other for other in request.excluded if other != name)
        yield f"allow {name}, which is excluded", job.with_request(excluded=rest)
    if not request.host_memory:
        yield "allow host memory (host_memory=True, --host-memory)", job.with_request(host_memory=True)
    if PRECISIONS.index(request.precision) < PRECISIONS.index("half"):
        yield 'allow 16-bit parameters (precision="half", --precision half)', job.with_request(precision="half")


def _smaller_batches(job: J) -> Iterator[tuple[str, J]]:
    """Use fewer samples a step, so that fewer devices have samples of their own and more share the model."""
    for share in FACTORS:
        if job.global_batch % share == 0:
            batch = job.global_batch // share
            yield f"use a global batch of {batch} instead of {job.global_batch}", job.with_request(global_batch=batch)


def _shorter_sequences(job: J) -> Iterator[tuple[str, J]]:
    length = job.profile.sequence_length
    for share in FACTORS:
        if length and length % share == 0 and length // share >= 1:
            text = f"use sequences of {length // share} instead of {length} tokens"
            same_batch = job.with_request(global_batch=job.global_batch)
            yield text, replace(same_batch, profile=_shortened(job.profile, share))


def _larger_clusters(job: J) -> Iterator[tuple[str, J]]:
    for factor in FACTORS:
        nodes = job.cluster.num_nodes * factor
        text = f"use {nodes * job.cluster.devices_per_node} of these devices instead of {job.cluster.world_size}"
        yield text, replace(job, cluster=replace(job.cluster, num_nodes=nodes))


def _experts(job: J) -> Iterator[tuple[str, J]]:
    request = job.request
    if job.has_experts and EXPERTS not in (*request.included, *request.excluded):
        text = f"train with a program that has {EXPERTS}, which is only for plans here (--include {EXPERTS})"
        yield text, job.with_request(included=(*request.included, EXPERTS))


def _shortened(profile: ModelProfile, share: int) -> ModelProfile:
    """The profile of sequences that are `share` times shorter, so that the traced figures are those of more samples.

    Quadratic terms shrink only linearly, so that no estimate is too small.
    """

    def shorter(segments: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(replace(segment, sequence_length=segment.sequence_length // share) for segment in segments)

    return replace(
        profile,
        segments=shorter(profile.segments),
        in_half=shorter(profile.in_half),
        in_autocast=shorter(profile.in_autocast),
        batch_size=profile.batch_size * share,
    )
