"""The largest or smallest size of a job that fits: batch, sequence, devices, rank of adapters, model.

Sizes are doubled until one no longer fits, then the interval is halved, so the answer is exact to an eighth. The models
of the catalogue are in the order of their parameters, and the border is found by bisection. Nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

from atorch.auto.plan_for_cluster import plan_for
from atorch.auto.planner.request import RANK, PlanRequest
from atorch.auto.strategy import METHODS, Method
from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError, NoFeasiblePlanError, near_miss
from atorch.units import format_count, format_seconds, plural

if TYPE_CHECKING:
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.auto.sources import JobSource

Solved = Literal["batch", "seq", "devices", "rank", "model"]
SOLVED: tuple[str, ...] = get_args(Solved)
MAX_DEVICES, MAX_BATCH, MAX_SEQ, MAX_RANK = 2**17, 2**24, 2**24, 2**12  # where searches end
FIRST_SEQ = 4096  # where the search for a length begins
HALVINGS = 3
BESIDE = 2  # models on each side of the border that are tried and shown

PlanForSize = Callable[[int], "ClusterPlan"]  # raises NoFeasiblePlanError
Tell = Callable[[str, "ClusterPlan | None"], None]
"""Called with each size that was tried, in words, and its plan, or None if nothing fits."""
TellSize = Callable[[int, "ClusterPlan | None"], None]
_NOUNS: Mapping[str, str] = {"batch": "sample", "seq": "token", "devices": "device"}
_WORDS: Mapping[str, str] = {
    "batch": "The largest batch that fits in one pass{within}: {size} a step",
    "seq": "The longest sequence that fits{within}: {size}",
    "devices": "The fewest devices that fit{within}: {size}",
    "rank": "The largest adapters that fit{within}: {size}",
}


def solved(
    what: str,
    make: Callable[[PlanRequest], JobSource],
    cluster: ClusterSpec,
    seq: int | None,
    request: PlanRequest,
    tell: Tell = lambda size, plan: None,
) -> ClusterPlan:
    """The plan at the largest batch, sequence, rank or model that fits, or on the fewest devices, with its `solved`.

    Args:
        make: makes the job that is trained as a request says; not called for "model".
        request: what fits, as `max_step` bounds it; host memory only if it is allowed.
        tell: called with each size that was tried.

    Raises:
        ArgumentError: the size to find is given or cannot vary, or one that it depends on is missing.
        NoFeasiblePlanError: no size fits.
    """
    if what not in SOLVED:
        raise ArgumentError(f"solve is {what!r}; {near_miss(str(what), SOLVED)}")
    request = replace(request, verify=0, host_memory=bool(request.host_memory))
    if what == "model":
        return _largest_model(cluster, seq, request, tell)
    ask = partial(plan_for, advise=False)

    def tell_size(size: int, plan: ClusterPlan | None) -> None:
        tell(_size(what, size), plan)

    if what == "rank":
        _, colon, targets = str(request.lora or RANK).partition(":")

        def with_rank(rank: int) -> PlanRequest:
            return replace(request, lora=f"{rank}{colon}{targets}")

        def of_rank(rank: int) -> ClusterPlan:
            job = with_rank(rank)
            return ask(make(job).subject(seq, cluster), cluster, request=job)

        first = (request.adapters or (RANK,))[0]
        seq = seq or make(with_rank(first)).subject(seq, cluster).profile.sequence_length  # tells a default once
        return _named(what, largest(of_rank, first, MAX_RANK, tell_size), request)
    source = make(request)
    _check(what, source, request)
    if what == "seq":

        def of_length(size: int) -> ClusterPlan:
            return ask(source.subject(size, cluster), cluster, request=request)

        return _named(what, largest(of_length, seq or FIRST_SEQ, MAX_SEQ, tell_size), request)
    subject = source.subject(seq, cluster)
    if what == "devices":
        of_cluster = partial(ask, subject, request=request)
        return _named(what, smallest_cluster(of_cluster, cluster, MAX_DEVICES, tell_size), request)
    in_parts = {name for name in METHODS if METHODS[name].in_parts is not Method.in_parts}
    whole = replace(request, excluded=sorted(in_parts.union(request.excluded)))

    def of_batch(size: int) -> ClusterPlan:
        return ask(subject, cluster, request=replace(whole, global_batch=size))

    return _named(what, largest(of_batch, cluster.world_size, MAX_BATCH, tell_size), request)


def _check(what: str, source: JobSource, request: PlanRequest) -> None:
    """Raise ArgumentError if the number to find is given or cannot vary, or if one that it depends on is missing."""
    if what == "batch" and request.global_batch is not None:
        raise ArgumentError("solve batch looks for the batch; leave --batch (global_batch) out")
    if what == "devices" and request.global_batch is None:
        raise ArgumentError("solve devices needs the batch that all devices share; give --batch (global_batch)")
    if what == "seq" and not source.takes_seq:
        raise ArgumentError(f"solve seq varies the length of a sample; let {source.title} have a parameter seq")


def _named(what: str, fit: Fit, request: PlanRequest) -> ClusterPlan:
    """The plan with its `solved`: the size, what was tried, and words with the nearest size that does not fit."""
    sign = -1 if what == "devices" else 1
    beyond = [size for size, fits in fit.tried if not fits and sign * size > sign * fit.size]
    odd = sorted(size for size, fits in fit.tried if not fits and sign * size < sign * fit.size)
    words = _WORDS[what].format(size=_size(what, fit.size), within=_within(request))
    if beyond:
        words += f"; {min(beyond, key=lambda size: abs(size - fit.size)):,} does not"
    if odd:
        words += f"; yet {', '.join(f'{size:,}' for size in odd)} do not, so sizes that were not tried may fit, too"
    words += "" if fit.is_bounded else ", where the search ends"
    data = {"what": what, "size": fit.size, "is_bounded": fit.is_bounded, "tried": fit.tried, "words": words}
    return replace(fit.plan, solved=data)


def _size(what: str, size: int) -> str:
    return plural(size, _NOUNS[what]) if what in _NOUNS else f"rank {size:,}"


def _within(request: PlanRequest) -> str:
    return f" in {format_seconds(request.max_step)} a step" if request.max_step else ""


def _largest_model(cluster: ClusterSpec, seq: int | None, request: PlanRequest, tell: Tell) -> ClusterPlan:
    """The plan for the model of the catalogue with the most parameters that fits."""
    from atorch.auto.sources import catalogue_of

    models = sorted(catalogue_of(request, seq, cluster), key=lambda model: model[1].profile.num_params)
    plans: dict[int, ClusterPlan | None] = {}
    refusal: NoFeasiblePlanError | None = None

    def fits(place: int) -> bool:
        nonlocal refusal
        if place not in plans:
            named, subject = models[place]
            plans[place] = None
            try:
                plans[place] = plan_for(subject, cluster, advise=False, request=request)
            except NoFeasiblePlanError as error:
                refusal = error
            tell(f"{named}, {format_count(subject.profile.num_params)}", plans[place])
        return plans[place] is not None

    low, high = -1, len(models)  # the last that fits, the first after it
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    place = low
    while place + 1 < min(low + 1 + BESIDE, len(models)):  # not every larger one needs more
        place += 1
        low = place if fits(place) else low
    plan = plans.get(low)
    if plan is None:
        assert refusal is not None, "something was tried"
        raise refusal
    for place in range(max(0, low - BESIDE), low):
        fits(place)
    rows = [
        {
            "model": models[place][0],
            "num_params": models[place][1].profile.num_params,
            "fits": tried is not None,
            "step_s": tried.estimate.step_s if tried else None,
        }
        for place, tried in sorted(plans.items())
    ]
    named, subject = models[low]
    count = format_count(subject.profile.num_params)
    words = f"The largest of {len(models)} models that fits{_within(request)}: {named}, {count} parameters"
    words += ", the largest of all" if low + 1 == len(models) else ""
    data = {"what": "model", "size": subject.profile.num_params, "model": named, "is_bounded": low + 1 < len(models)}
    return replace(plan, solved={**data, "tried": rows, "words": words})


@dataclass(frozen=True)
class Fit:
    """The last size that fits, and the plan for it."""

    size: int
    plan: ClusterPlan
    tried: tuple[tuple[int, bool], ...]  # (size, whether it fits), in the order of the search
    is_bounded: bool = True  # False if every size that was tried fits


class _Questions:
    """Asks for plans and records the outcomes."""

    def __init__(self, ask: PlanForSize, tell: TellSize) -> None:
        self.tried: list[tuple[int, bool]] = []
        self.refusal: NoFeasiblePlanError | None = None  # the last
        self._ask, self._tell = ask, tell

    def plan(self, size: int) -> ClusterPlan | None:
        plan: ClusterPlan | None = None
        try:
            plan = self._ask(size)
        except NoFeasiblePlanError as error:
            self.refusal = error
        self.tried.append((size, plan is not None))
        self._tell(size, plan)
        return plan


def largest(ask: PlanForSize, first: int, limit: int, tell: TellSize) -> Fit:
    """The largest size up to `limit` that fits; the search begins at `first`.

    Raises:
        NoFeasiblePlanError: not even 1 fits.
    """
    questions = _Questions(ask, tell)
    size, plan = first, questions.plan(first)
    while plan is None:
        size //= 2
        if size < 1:
            assert questions.refusal is not None
            raise questions.refusal
        plan = questions.plan(size)
    if size == first:
        while 2 * size <= limit and (larger := questions.plan(2 * size)) is not None:
            size, plan = 2 * size, larger
        if 2 * size > limit:
            return Fit(size, plan, tuple(questions.tried), is_bounded=False)
    step = size // 2
    for _ in range(HALVINGS):
        if step >= 1 and (larger := questions.plan(size + step)) is not None:
            size, plan = size + step, larger
        step //= 2
    return Fit(size, plan, tuple(questions.tried))


def smallest_cluster(ask: Callable[[ClusterSpec], ClusterPlan], kind: ClusterSpec, limit: int, tell: TellSize) -> Fit:
    """The fewest devices of this kind that fit, up to `limit`: part of one node, then whole nodes.

    Raises:
        NoFeasiblePlanError: not even `limit` devices fit.
    """
    questions = _Questions(lambda size: ask(sized(kind, size)), tell)
    below = 0
    for size in _ladder(kind.devices_per_node, limit):
        plan = questions.plan(size)
        if plan is not None:
            return _fewer(questions, kind.devices_per_node, below, size, plan)
        below = size
    assert questions.refusal is not None
    raise questions.refusal


def sized(kind: ClusterSpec, devices: int) -> ClusterSpec:
    per_node = kind.devices_per_node
    if devices <= per_node:
        return replace(kind, num_nodes=1, devices_per_node=devices)
    return replace(kind, num_nodes=devices // per_node)


def _ladder(per_node: int, limit: int) -> Iterator[int]:
    powers = [2**power for power in range(limit.bit_length())]
    yield from (size for size in powers if size < per_node)
    yield from (per_node * number for number in powers if per_node * number <= limit)


def _fewer(questions: _Questions, per_node: int, below: int, size: int, plan: ClusterPlan) -> Fit:
    """Bisect the number of whole nodes between the last that did not fit and the first that did."""
    best, low, high = plan, below // per_node, size // per_node
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        if below < per_node or middle in (low, high):
            break
        candidate = questions.plan(middle * per_node)
        if candidate is None:
            low = middle
        else:
            best, high, size = candidate, middle, middle * per_node
    return Fit(size, best, tuple(questions.tried))
