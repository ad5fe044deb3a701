"""Which composition trains a model best on a cluster that need not be here, by arithmetic alone, and why.

The best under the estimate is found, or how far from it the answer may be is told (`best_first`); what is nearer to it
than the estimate is right is shown beside it, with what other choices would have done, and what binds the others.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, get_args

from atorch.auto.planner.best_first import TIE, Found, best_first
from atorch.auto.planner.cluster_plan import ClusterPlan, Ranked
from atorch.auto.planner.columns import Columns
from atorch.auto.planner.counterfactuals import Room, counterfactuals
from atorch.auto.planner.estimate import RESERVE, estimate_of, usable_bytes, usable_host_bytes
from atorch.auto.planner.plan import Estimate, Rejected
from atorch.auto.planner.remedies import Job, remedies
from atorch.auto.planner.space import MESH, Space, names_in, plannable
from atorch.auto.strategy import EXACTNESS, Exactness, Method, Strategy
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile, plain_cost
from atorch.distributed.mesh import AXES
from atorch.errors import ArgumentError, NoFeasiblePlanError, StrategyError, near_miss
from atorch.units import format_bytes

Objective = Literal["step_time", "throughput", "cost", "fewest_devices"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
BREADTH, LEAST_BREADTH = 50, 5_000  # compositions to be scored: for each device, and at least
MOST = 50_000  # compositions that are scored without proof that the best is among them
EXAMPLES = 3  # of what each constraint rejects
MOST_TIES = 100
EQUAL = 1e-3  # a share of a step: what differs by less is as fast
WORTH = 0.2  # of a step, what waiting on the host must save: so wrong may estimates of it be, which no run was held to


def answer(
    profile: ModelProfile,
    cluster: ClusterSpec,
    *,
    global_batch: int,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
    precision: Exactness = "half",
    host_memory: bool | None = None,
    reserve: float = RESERVE,
    objective: str = "step_time",
    keep: int = 20,
    breadth: int | None = None,
    prove: bool = False,
    advise: bool = True,
) -> ClusterPlan:
    """The best composition for a model, a cluster and a batch.

    Args:
        global_batch: samples of a step, of all devices together.
        excluded, included, fixed: see `space.plannable`.
        precision: the least exact numbers that methods may train in which are neither included nor fixed: "fp32",
            "autocast", "half" (16 bits, with fp32 masters) or "fp8".
        host_memory: whether something may wait in host memory; None: where nothing fits without.
        reserve: share of a device's memory that nothing may use.
        objective: "step_time" and "throughput" take the fastest step, which at a given batch is the same; "cost" the
            least device-seconds a step, on all of the cluster or a part of it; "fewest_devices" the smallest part that
            fits, and the fastest there.
        keep: compositions in the ranking.
        breadth: how many compositions are scored at least, where there are as many and bounds would do with fewer;
            None: 50 for each device, and 5,000.
        prove: search until the best under the estimate is proven, however long it takes; else the search ends with
            50,000 compositions, and `gap` says what one that was not scored might save.
        advise: where nothing fits, look for the nearest miss and for what would make it fit.

    Raises:
        ArgumentError: an objective that there is not.
        NoFeasiblePlanError: nothing fits; the nearest miss is named, with what would make it fit.
        StrategyError: nothing legal is left, or an argument does not hold.
    """
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective is {objective!r}; {near_miss(objective, OBJECTIVES)}")
    if precision not in EXACTNESS:
        raise ArgumentError(f"precision is {precision!r}; {near_miss(str(precision), EXACTNESS)}")
    if host_memory not in (None, True, False):
        raise ArgumentError(
            f"host_memory is {host_memory!r}; it is True, False, or None for where nothing fits without"
        )
    began = time.monotonic()
    listed = None if included is None or isinstance(included, str) else tuple(included)
    job = Job(profile, cluster, global_batch, names_in(excluded, "excluded"), precision, bool(host_memory))
    question = _Question(job, included if listed is None else listed, fixed, reserve)
    if host_memory is None and not question.fits():
        question = replace(question, job=replace(job, host_memory=True))
    if objective in ("cost", "fewest_devices"):
        question = replace(question, job=_best_part(question, _MEASURES[objective]))
    space = question.space()
    if breadth is None:
        breadth = max(BREADTH * question.job.cluster.world_size, LEAST_BREADTH)
    most = math.inf if prove else max(breadth, MOST)
    found = question.found(space, keep=keep, breadth=breadth, most=most, nearest=advise)
    rows = found.columns.fastest(keep)
    plain = _without_host(question, found, rows)
    if plain is not None:
        question, space, found = plain
        rows = found.columns.fastest(keep)
    if not rows and not advise:
        raise NoFeasiblePlanError(f"nothing fits on {question.job.cluster.world_size} × {cluster.device.name}")
    if not rows:
        raise _nothing_fits(question, space, found)
    return _plan(question, space, found, rows, objective, began)


@dataclass(frozen=True)
class _Question:
    job: Job
    included: Iterable[str] | None
    fixed: Strategy | None
    reserve: float

    def fits(self) -> bool:
        """Whether anything fits."""
        try:
            return bool(self.found(nearest=False, most=1).columns.fits.any())
        except StrategyError:
            return False

    @property
    def start(self) -> Cost:
        device = self.job.cluster.device
        return plain_cost(self.job.profile, self.job.global_batch, device.memory_bytes)

    @property
    def room(self) -> Room:
        cluster = self.job.cluster
        return Room(usable_bytes(cluster, self.reserve), usable_host_bytes(cluster, self.reserve))

    def space(self, *, applicable: bool = False) -> Space:
        return plannable(
            self.job.profile,
            self.job.cluster,
            excluded=self.job.excluded,
            included=self.included,
            fixed=self.fixed,
            applicable=applicable,
            precision=self.job.precision,
            host_memory=self.job.host_memory,
        )

    def found(
        self, space: Space | None = None, *, keep: int = 1, breadth: int = 0, most: float = MOST, nearest: bool = True
    ) -> Found:
        return best_first(
            space or self.space(),
            self.start,
            self.job.cluster,
            device_bytes=self.room.device_bytes,
            host_bytes=self.room.host_bytes,
            keep=keep,
            breadth=breadth,
            most=most,
            nearest=nearest,
        )

    def estimate(self, methods: Sequence[Method]) -> Estimate:
        return estimate_of(Strategy(tuple(methods)).cost(self.start), self.job.cluster)

    def ranked(self, methods: tuple[Method, ...]) -> Ranked:
        return Ranked(Strategy(methods), self.estimate(methods))


def _plan(
    question: _Question, space: Space, found: Found, rows: Sequence[int], objective: str, began: float
) -> ClusterPlan:
    columns, room, cluster = found.columns, question.room, question.job.cluster
    first = _preferred(columns, rows)
    chosen = columns.methods[first]
    best = question.ranked(chosen)
    return ClusterPlan(
        strategy=best.strategy,
        estimate=best.estimate,
        measured=None,
        rejected=tuple(_rejected(question, space, columns, first)),
        num_compositions=len(columns),
        num_dry_runs=0,
        memory_bytes=cluster.device.memory_bytes,
        cluster=cluster,
        global_batch=question.job.global_batch,
        objective=objective,
        usable_bytes=room.device_bytes,
        ranking=(best, *(question.ranked(columns.methods[row]) for row in rows if row != first)),
        near_ties=tuple(question.ranked(columns.methods[row]) for row in _ties(columns, first)),
        best_applicable=_best_applicable(question, best),
        counterfactuals=counterfactuals(space, chosen, question.start, cluster, room),
        counts_by_axis=_counts(columns, space),
        candidates=columns,
        gap=found.gap,
        num_unopened={"slower": found.num_slow, "memory": found.num_large},
        seconds=time.monotonic() - began,
    )


def _without_host(question: _Question, found: Found, rows: Sequence[int]) -> tuple[_Question, Space, Found] | None:
    """The same question without host memory, where that takes hardly longer than what was found with it; else None."""
    columns = found.columns
    if not rows or not question.job.host_memory or not columns.on_host[_preferred(columns, rows)]:
        return None
    plain = replace(question, job=replace(question.job, host_memory=False))
    try:
        space = plain.space()
        instead = plain.found(space, keep=len(rows), nearest=False)
    except StrategyError:
        return None
    best = instead.columns.fastest(1)
    if not best or instead.columns.step_s[best[0]] > columns.step_s[rows[0]] * (1 + WORTH):
        return None
    return plain, space, instead


def _preferred(columns: Columns, rows: Sequence[int]) -> int:
    """Of the rows that the estimate cannot tell from the fastest the simplest, and one that can be applied today.

    What waits on the host is less simple than what does not, and a method more than one less; then what splits the
    model along fewer axes of the mesh is simpler.
    """
    limit = columns.step_s[rows[0]] * (1 + TIE)
    near = [row for row in columns.fastest() if columns.step_s[row] <= limit]
    able = [row for row in near if all(each.can_apply() for each in columns.methods[row])]
    if columns.step_s[(able or near)[0]] > columns.step_s[rows[0]] * (1 + EQUAL):
        able = []
    return min(able or near, key=lambda row: (*_intricacy(columns, row), columns.step_s[row]))


def _intricacy(columns: Columns, row: int) -> tuple[bool, int, int]:
    methods = columns.methods[row]
    axes = sum(len(getattr(each, "slices", ())) for each in methods if each.slot == MESH)
    return bool(columns.on_host[row] > 0), len(methods), axes


def _ties(columns: Columns, chosen: int) -> Iterator[int]:
    """Rows that are nearer to the fastest than the estimate is right, but for the chosen one, the simplest first."""
    limit = columns.step_s[columns.fastest(1)[0]] * (1 + TIE)
    near = [row for row in columns.fastest() if columns.step_s[row] <= limit and row != chosen]
    return iter(sorted(near, key=lambda row: (len(columns.methods[row]), columns.step_s[row]))[:MOST_TIES])


def _best_applicable(question: _Question, best: Ranked) -> Ranked | None:
    """The fastest of methods that can be applied today."""
    if all(each.can_apply() for each in best.strategy):
        return best
    try:
        columns = question.found(question.space(applicable=True), nearest=False).columns
    except StrategyError:
        return None
    rows = columns.fastest(1)
    if not rows or not all(each.can_apply() for each in columns.methods[rows[0]]):
        return None
    return question.ranked(columns.methods[rows[0]])


def _rejected(question: _Question, space: Space, columns: Columns, chosen: int) -> Iterator[Rejected]:
    """The fastest that each constraint rejects; the fastest with each method that the chosen one lacks; the unmet."""
    why, shown = columns.why(), Counter[str]()
    lacking = {each.name for each in columns.methods[chosen]}
    for row in columns.step_s.argsort(kind="stable").tolist():
        names = {each.name for each in columns.methods[row]}
        if why[row] and shown[why[row]] < EXAMPLES:
            shown[why[row]] += 1
            estimate = question.estimate(columns.methods[row])
            reason = question.room.short(estimate) or why[row]
            strategy = Strategy(columns.methods[row])
            yield Rejected(strategy=strategy, why="memory", reason=reason, estimate=estimate)
        elif not why[row] and row != chosen and not names <= lacking:
            lacking |= names
            ratio = columns.step_s[row] / columns.step_s[chosen] - 1
            estimate = question.estimate(columns.methods[row])
            strategy = Strategy(columns.methods[row])
            told = "as fast" if abs(ratio) < EQUAL else f"{-ratio:.1%} faster, which is a tie,"
            reason = f"{ratio:.1%} slower" if ratio >= EQUAL else f"{told} and less simple"
            yield Rejected(strategy=strategy, why="slower", reason=reason, estimate=estimate)
    for method, reason in space.unmet:
        yield Rejected(strategy=Strategy((method,)), why="hardware", reason=reason)


def _counts(columns: Columns, space: Space) -> dict[str, dict[str, int]]:
    """How many scored compositions have each size of each axis, and each method or none in each slot."""
    sets = Counter(map(id, chain.from_iterable(columns.methods)))
    held = {id(each): each for each in chain.from_iterable(columns.methods)}
    counts: dict[str, Counter[str]] = {axis: Counter() for axis in AXES}
    for key, number in sets.items():
        method = held[key]
        if method.slot == MESH:
            sizes = dict(method.slices) if hasattr(method, "slices") else {}
            for axis in AXES:
                counts[axis][str(sizes.get(axis, 1))] += number
        else:
            counts.setdefault(method.slot, Counter())[str(method)] += number
    for name, values in counts.items():
        missing = len(columns) - sum(values.values())
        if missing:
            values["1" if name in AXES else "none"] += missing
    return {name: dict(sorted(values.items(), key=_by_size)) for name, values in counts.items()}


def _by_size(item: tuple[str, int]) -> tuple[int, str]:
    return (int(item[0]) if item[0].isdigit() else -1, item[0])


_MEASURES: Mapping[str, Callable[[float, int], float]] = {
    "cost": lambda step_s, devices: step_s * devices,
    "fewest_devices": lambda step_s, devices: devices,
}


def _best_part(question: _Question, measure: Callable[[float, int], float]) -> Job:
    """The job on the part of the cluster with the least of a measure of (seconds of a step, devices)."""
    least, best = float("inf"), question.job
    for part in _parts(question.job.cluster):
        job = replace(question.job, cluster=part)
        if measure(0.0, part.world_size) >= least:
            break
        try:
            columns = replace(question, job=job).found(nearest=False).columns
        except StrategyError:
            continue
        rows = columns.fastest(1)
        if rows and measure(columns.step_s[rows[0]], part.world_size) < least:
            least, best = measure(columns.step_s[rows[0]], part.world_size), job
    return best


def _parts(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Powers of two of a node's devices, then of nodes, then all."""
    size = 1
    while size < cluster.devices_per_node:
        yield replace(cluster, num_nodes=1, devices_per_node=size)
        size *= 2
    size = 1
    while size < cluster.num_nodes:
        yield replace(cluster, num_nodes=size)
        size *= 2
    yield cluster


def _nothing_fits(question: _Question, space: Space, found: Found) -> StrategyError | NoFeasiblePlanError:
    """The nearest miss, and what would help."""
    columns = found.columns
    if not len(columns):
        reasons = "; ".join(reason for reason, _ in space.refused.most_common(3))
        return StrategyError(f"no legal composition is left: {reasons or 'exclude fewer methods'}")
    row = int(columns.short_bytes.argmin())
    strategy, estimate = Strategy(columns.methods[row]), question.estimate(columns.methods[row])

    helps = remedies(question.job, lambda job: replace(question, job=job).fits())
    advice = f"What would make it fit: {'; or '.join(helps)}" if helps else "Use a smaller model, or larger devices"
    rejected = Rejected(
        strategy=strategy, why="memory", reason=question.room.short(estimate) or columns.why()[row], estimate=estimate
    )
    cluster, batch = question.job.cluster, question.job.global_batch
    usable = format_bytes(question.room.device_bytes)
    return NoFeasiblePlanError(
        f"nothing fits on {cluster.world_size} × {cluster.device.name} with {usable} usable each and a global batch of "
        f"{batch}. The nearest miss, {strategy}, {rejected.reason}. {advice}",
        [rejected.to_json_data() | {"short_bytes": float(columns.short_bytes[row]), "remedies": list(helps)}],
    )
