"""Finds the best composition for a model on a cluster that need not be present, by arithmetic alone, with reasons.

The search finds the best by estimate, or states the remaining gap (`best_first`). The plan lists compositions that the
estimate cannot distinguish from the choice, counterfactuals, and the limits that reject others.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from atorch.auto.planner.best_first import BestFound, best_first, uncollected
from atorch.auto.planner.bounds import num_legal
from atorch.auto.planner.candidate_table import EQUAL, CandidateTable
from atorch.auto.planner.estimate import EstimateUncertainty, estimate_of, usable_bytes, usable_host_bytes
from atorch.auto.planner.explanation import MemoryLimits, counterfactuals, remedies
from atorch.auto.planner.plan import ClusterPlan, Estimate, Rejected, Scored, json_data
from atorch.auto.planner.request import EXPERTS, PlanJob, PlanRequest
from atorch.auto.planner.space import MESH, Space, plannable
from atorch.auto.strategy import Method, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, StepTimes, plain_cost
from atorch.cost.parallelism import AXES
from atorch.errors import NoFeasiblePlanError, StrategyError
from atorch.units import format_bytes, format_seconds

MOST = 50_000  # limit of scored compositions without proof that the best is among them
FEW_LOOKS = 1000  # the same for visited branches, to compare with expert parallelism
EXAMPLES = 3  # compositions that are listed for each limit that rejects some
WORTH = 0.2  # share of a step that host memory must save, as no runs confirm its estimates


@uncollected()
def answer(
    profile: ModelProfile,
    cluster: ClusterSpec,
    request: PlanRequest | None = None,
    *,
    keep: int = 20,
    prove: bool = False,
    advise: bool = True,
    count: bool = False,
    **knobs: Any,
) -> ClusterPlan:
    """The best composition for a model, a cluster and a batch.

    Args:
        request, knobs: a `PlanRequest`, or the knobs of one.
        keep: compositions in the ranking.
        prove: search until the best by estimate is proven, without a limit; else the search ends after 50,000
            compositions, and `gap` is the share of a step that an unscored one might save.
        advise: if nothing fits, look for the nearest miss and for remedies.
        count: also count the legal compositions, which takes long in comparison with a small search.

    Raises:
        ArgumentError: an invalid knob.
        NoFeasiblePlanError: nothing fits; the nearest miss is named, with remedies.
        StrategyError: no composition is legal, or a knob names an unknown method.
    """
    began, request = time.monotonic(), PlanRequest(**knobs) if request is None else request
    question, space, found = _searched(
        _Question(profile, cluster, request),
        breadth=keep,
        most=math.inf if prove else MOST,
        nearest=advise and not request.max_step,
    )
    rows = found.columns.fastest(keep)
    if not rows and not advise:
        within = f" in {format_seconds(request.max_step)} a step" if request.max_step else ""
        raise NoFeasiblePlanError(f"nothing fits{within} on {question.cluster.world_size} × {cluster.device.name}")
    if not rows and request.max_step:
        asked = question
        question, space, found = _searched(asked.with_request(max_step=None), breadth=1, most=MOST)
        if found.columns.fitting:
            raise _too_slow(asked, found)
    if not rows:
        raise _nothing_fits(question, space, found)
    plan = _plan(question, space, found, rows, request.objective, began)
    return replace(plan, num_legal=num_legal(space, question.start)) if count else plan


def beside_experts(job: PlanJob, plan: ClusterPlan) -> Iterator[str]:
    """Compare a mixture's plan with the best with expert parallelism or, if it has that, with the best without."""
    request = job.request
    if EXPERTS in plan.strategy.names():
        given = {name: getattr(request, name) for name in ("fixed", "extend")}
        less = {name: strategy and strategy.without(EXPERTS) for name, strategy in given.items()}
        job = job.with_request(included=tuple(name for name in request.included if name != EXPERTS), **less)
    elif not job.has_experts or EXPERTS in request.excluded or request.fixed is not None:
        return
    else:
        job = job.with_request(included=(*request.included, EXPERTS))
    step_s, told = math.inf, "nothing fits"
    with suppress(StrategyError):
        _, _, found = _searched(
            _Question(job.profile, plan.cluster, job.request), breadth=1, nearest=False, most_looks=FEW_LOOKS
        )
        for row in found.columns.fastest(1):
            step_s = float(found.columns.step_s[row])
            told = f"{format_seconds(step_s)}, by {Strategy(found.columns.methods[row])}"
    if EXPERTS in plan.strategy.names():
        yield f"{EXPERTS} is only for plans: atorch cannot apply it yet; the best that it can: {told}"
    elif step_s < plan.estimate.step_s:
        yield f"with {EXPERTS}, which is only for plans, a step would take {told} (plan it with --include {EXPERTS})"
    else:
        yield f"{EXPERTS}, which is only for plans, would not make it faster"


@dataclass(frozen=True)
class _Question(PlanJob):
    def fits(self) -> bool:
        try:
            return bool(self.found(self.space(), nearest=False, most=1).columns.fitting)
        except StrategyError:
            return False

    @property
    def start(self) -> Cost:
        cost = plain_cost(self.profile, self.global_batch, self.cluster.device.memory_bytes)
        return cost.replace(**self.request.trainer_traits.cost)

    @property
    def limits(self) -> MemoryLimits:
        cluster, reserve = self.cluster, self.request.reserve
        return MemoryLimits(usable_bytes(cluster, reserve), usable_host_bytes(cluster, reserve))

    def space(self) -> Space:
        names = ("excluded", "included", "fixed", "extend", "precision", "target")
        knobs = {name: getattr(self.request, name) for name in names}
        return plannable(self.profile, self.cluster, **knobs, host_memory=bool(self.request.host_memory))

    def found(self, space: Space, *, breadth: int = 1, most: float = MOST, **more: Any) -> BestFound:
        more |= {"device_bytes": self.limits.device_bytes, "host_bytes": self.limits.host_bytes}
        more["limit_s"] = min(more.get("limit_s", math.inf), self.request.max_step or math.inf)
        return best_first(space, self.start, self.cluster, breadth=breadth, most=most, times=self.times, **more)

    @cached_property
    def times(self) -> StepTimes:
        return StepTimes(self.cluster)

    @cached_property
    def doubt(self) -> EstimateUncertainty:
        return EstimateUncertainty(self.start, self.cluster, self.times)

    def estimate(self, methods: tuple[Method, ...]) -> Estimate:
        estimate = estimate_of(Strategy(methods).cost(self.start), self.cluster, self.times)
        return self.doubt.with_band(methods, estimate)

    def ranked(self, methods: tuple[Method, ...], chance: float | None = None) -> Scored:
        return Scored(Strategy(methods), self.estimate(methods), chance)


_Search = tuple[_Question, Space, BestFound]


def _searched(question: _Question, **wanted: Any) -> _Search:
    """Search, with host memory only if nothing fits without, or if it is allowed and saves enough."""
    allowed, objective = question.request.host_memory, question.request.objective
    plain = _without_host(question, wanted) if allowed is None else None
    if plain is not None:
        return plain
    question = question.with_request(host_memory=allowed is not False)
    if objective in _MEASURES:
        question = replace(question, cluster=_best_part(question, _MEASURES[objective]))
    if allowed:
        plain = _without_host(question.with_request(objective="step_time"), wanted)
    limit_s = math.inf if plain is None else plain[2].least_s / (1 + WORTH)
    space = question.space()
    found = question.found(space, limit_s=limit_s, **wanted)
    return plain if plain is not None and not found.columns.fitting else (question, space, found)


def _without_host(question: _Question, wanted: Mapping[str, Any]) -> _Search | None:
    try:
        plain = _searched(question.with_request(host_memory=False), **{**wanted, "nearest": False})
    except StrategyError:
        return None
    return plain if plain[2].columns.fitting else None


def _plan(
    question: _Question, space: Space, found: BestFound, rows: Sequence[int], objective: str, began: float
) -> ClusterPlan:
    columns, limits, cluster = found.columns, question.limits, question.cluster
    doubt = question.doubt
    first = doubt.chosen(columns)
    chosen, note = columns.methods[first], doubt.note(columns, first)
    best = question.ranked(chosen)

    def ranked(row: int) -> Scored:
        return question.ranked(columns.methods[row], doubt.chance(columns, row, first))

    ranking = (best, *(ranked(row) for row in rows if row != first))
    near_ties = tuple(ranked(row) for row in doubt.ties(columns, first))
    decisive = doubt.decisive(columns, first)
    neighbours = counterfactuals(space, chosen, question.start, limits, columns, question.times)
    return ClusterPlan(
        strategy=best.strategy,
        estimate=best.estimate,
        measured=None,
        rejected=tuple(_rejected(question, space, columns, first)),
        num_compositions=len(columns),
        num_dry_runs=0,
        memory_bytes=cluster.device.memory_bytes,
        cluster=cluster,
        global_batch=question.global_batch,
        objective=objective,
        usable_bytes=limits.device_bytes,
        ranking=ranking,
        near_ties=near_ties,
        decisive=decisive,
        notes=() if note is None else (note,),
        counterfactuals=neighbours,
        counts_by_axis=_counts(columns, space),
        candidates=columns,
        gap=found.gap,
        num_unopened={"slower": found.num_slow, "memory": found.num_large},
        seconds=time.monotonic() - began,
        num_params=question.profile.num_params,
        seq=question.profile.sequence_length or None,
        recipe=question.request.recipe,
    )


def _rejected(question: _Question, space: Space, columns: CandidateTable, chosen: int) -> Iterator[Rejected]:
    """The fastest compositions that each limit rejects, the fastest with each unchosen method, and unmet methods."""
    why, shown = columns.why(), Counter[str]()
    covered = {method.name for method in columns.methods[chosen]}
    for row in sorted(range(len(columns)), key=columns.step_s.__getitem__):
        names = {method.name for method in columns.methods[row]}
        if why[row] and shown[why[row]] < EXAMPLES:
            shown[why[row]] += 1
            yield _too_large(question, columns, row)
        elif not why[row] and row != chosen and not names <= covered:
            covered |= names
            ratio = columns.step_s[row] / columns.step_s[chosen] - 1
            speed = "as fast" if abs(ratio) < EQUAL else f"{-ratio:.1%} faster, which is a tie,"
            mine, other = columns.intricacy(chosen), columns.intricacy(row)
            less = "less certain" if other <= mine else "less simple" if other[0] == mine[0] else "with less room"
            reason = f"{ratio:.1%} slower" if ratio >= EQUAL else f"{speed} and {less}"
            yield question.ranked(columns.methods[row]).rejected("slower", reason)
    for method, reason in space.unmet:
        yield Rejected(strategy=Strategy((method,)), why="hardware", reason=reason)


def _too_large(question: _Question, columns: CandidateTable, row: int) -> Rejected:
    entry = question.ranked(columns.methods[row])
    return entry.rejected("memory", question.limits.short(entry.estimate) or columns.why()[row])


def _counts(columns: CandidateTable, space: Space) -> dict[str, dict[str, int]]:
    """Numbers of scored compositions by the size of each axis, and by the method in each slot."""
    uses = Counter(map(id, chain.from_iterable(columns.methods)))  # by id: hashing a method is slow
    by_id = {id(method): method for method in chain.from_iterable(columns.methods)}
    counts: dict[str, Counter[str]] = {axis: Counter() for axis in AXES}
    for key, number in uses.items():
        method = by_id[key]
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

    def size_of(value: str) -> tuple[int, str]:
        return int(value) if value.isdigit() else -1, value

    return {name: {value: values[value] for value in sorted(values, key=size_of)} for name, values in counts.items()}


_MEASURES: Mapping[str, Callable[[float, int], float]] = {
    "cost": lambda step_s, devices: step_s * devices,
    "fewest_devices": lambda step_s, devices: devices,
}


def _best_part(question: _Question, measure: Callable[[float, int], float]) -> ClusterSpec:
    """The part of the cluster with the smallest value of a measure of (seconds of a step, devices)."""
    least, best = float("inf"), question.cluster
    for part in _parts(question.cluster):
        if measure(0.0, part.world_size) >= least:
            break
        try:
            question_here = replace(question, cluster=part)
            columns = question_here.found(question_here.space(), nearest=False).columns
        except StrategyError:
            continue
        rows = columns.fastest(1)
        if rows and measure(columns.step_s[rows[0]], part.world_size) < least:
            least, best = measure(columns.step_s[rows[0]], part.world_size), part
    return best


def _parts(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Parts of the cluster: powers of two of a node's devices, then of nodes, then all."""
    for power in range((cluster.devices_per_node - 1).bit_length()):
        yield replace(cluster, num_nodes=1, devices_per_node=2**power)
    for power in range((cluster.num_nodes - 1).bit_length()):
        yield replace(cluster, num_nodes=2**power)
    yield cluster


def _too_slow(question: _Question, found: BestFound) -> NoFeasiblePlanError:
    """The error if something fits, as `found` without the bound on the step, but takes longer than it."""
    row, most = found.columns.fastest(1)[0], format_seconds(question.request.max_step)
    helps = remedies(question, _Question.fits)
    advice = f". What would make it faster: {'; or '.join(helps)}" if helps else ""
    return NoFeasiblePlanError(
        f"nothing that fits on {question.cluster.world_size} × {question.cluster.device.name} takes at most {most} a "
        f"step; the fastest, {Strategy(found.columns.methods[row])}, takes "
        f"{format_seconds(float(found.columns.step_s[row]))}{advice}"
    )


def _nothing_fits(question: _Question, space: Space, best: BestFound) -> StrategyError | NoFeasiblePlanError:
    columns = best.columns
    if not len(columns):
        reasons = "; ".join(reason for reason, _ in space.refused.most_common(3))
        return StrategyError(f"no legal composition is left: {reasons or 'exclude fewer methods'}")
    row = columns.nearest(1)[0]
    rejected, helps = _too_large(question, columns, row), remedies(question, _Question.fits)
    advice = f"What would make it fit: {'; or '.join(helps)}" if helps else "Use a smaller model, or larger devices"
    cluster, batch = question.cluster, question.global_batch
    usable = format_bytes(question.limits.device_bytes)
    return NoFeasiblePlanError(
        f"nothing fits on {cluster.world_size} × {cluster.device.name} with {usable} usable each and a global batch of "
        f"{batch}. The nearest miss, {rejected.strategy}, {rejected.reason}. {advice}",
        [json_data(rejected) | {"short_bytes": columns.short_bytes[row], "remedies": list(helps)}],
    )
