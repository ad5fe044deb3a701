"""Plans for absent clusters: traces a model without memory, scores compositions and simulates the best.

Nothing is sent, measured or trained. A model may be a function that makes it. It is made on the meta device, where 405
billion parameters take no memory. Only a model that cannot be made or traced there is made on a real device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from atorch.auto.argument_names import argument_remedy, name_positional
from atorch.auto.opt_lib.shared.optimizer_compatibility import kernel_notes
from atorch.auto.planner.request import PLAN_OPTIONS, PlanJob, PlanRequest
from atorch.auto.simulated_candidates import Doing, SimulationLimits, simulated
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import ModelProfile
from atorch.errors import ArgumentError, NoFeasiblePlanError, StrategyError, shown
from atorch.logs import logger
from atorch.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.profiler.trace import OfLength

PlanForMargin = Callable[[float], "ClusterPlan"]
"""Returns the plan that keeps this share of a device's memory free."""

MakeModel = Callable[[], "nn.Module"]
VERIFIED = 3  # default number of candidates that are simulated
PLANNING_S = 20.0  # default limit of a search with these simulations
FEW_BYTES = 2**30  # default limit of a model copy with values
ASKED_AGAIN = 3  # maximum number of further searches for a plan that fits by simulation too
LESS = 0.95  # second limit of such a search, as a share of the estimated bytes
_JOB = ("loss_func", "optim_func", "optim_args", "optim_param_func", "prepare_input", "model_input_format")
ROOM = 0.25  # share of free host memory for a model that cannot be made on the meta device


@dataclass(frozen=True)
class Subject:
    """The subject of a plan: the model's profile, and the traced job if it can be simulated."""

    profile: ModelProfile
    ctx: Context | None = None
    batch: Any = None
    model: str | None = None  # its id on the Hub, if it has one


def plan_for_cluster(model: Any, positional: Sequence[Any], cluster: Any, keywords: Mapping[str, Any]) -> ClusterPlan:
    """Carry out `plan` for a cluster.

    Raises:
        ArgumentError: an unknown or invalid argument.
    """
    from atorch.auto.solve import solved
    from atorch.auto.sources import JobSource

    wanted = {**keywords, **name_positional(positional, ("sample_batch",), keywords)}
    sample_batch = wanted.pop("sample_batch", None)
    for name in wanted:
        if name not in ("solve", *PLAN_OPTIONS, *_JOB):
            remedy = argument_remedy(name, ("solve", *PLAN_OPTIONS, *_JOB, "sample_batch"))
            raise ArgumentError(f"plan for a cluster has no argument {name!r}; {remedy}")
    spec = cluster_of(cluster)
    what = wanted.pop("solve", None)
    request = PlanRequest(**{name: wanted.pop(name) for name in PLAN_OPTIONS if name in wanted})

    def source(request: PlanRequest) -> JobSource:
        request.need_no_recipe("a model of your own")  # before the model is read, which may take minutes
        return JobSource(
            "a model of your own", False, lambda seq, spec: subject_of(model, sample_batch, spec, **wanted)
        )

    if what is not None:
        return solved(what, source, spec, None, request)
    return plan_for(source(request).subject(None, spec), spec, request=request)


def subject_of(
    model: nn.Module | MakeModel | ModelProfile, sample_batch: Any, cluster: ClusterSpec, **job: Any
) -> Subject:
    """The model's profile, traced on `sample_batch`.

    Args:
        model: a module, a function that makes one, or a profile, which needs no tracing and no `sample_batch`.
        job: further arguments of `make_context`, and `of_length` of `trace`.

    Raises:
        ArgumentError: the model cannot be traced, or an argument is invalid.
    """
    if isinstance(model, ModelProfile):
        if job or sample_batch is not None:
            raise ArgumentError(f"{', '.join(job) or 'sample_batch'} is given with a profile, which was traced before")
        return Subject(model)
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    if sample_batch is None:
        raise ArgumentError("a plan for a cluster traces the model, which needs a sample_batch; give one")
    if isinstance(sample_batch, (DataLoader, Dataset)):
        raise ArgumentError(
            f"sample_batch is a {type(sample_batch).__name__}; give one batch of it, as next(iter(loader)), in which "
            "the model takes what prepare_input makes of it"
        )
    if isinstance(model, nn.Module):
        return _traced(model, sample_batch, cluster, job)
    if not callable(model):
        raise ArgumentError(f"model is {shown(model)}; give a torch.nn.Module or a function that makes one")
    return _of_maker(model, sample_batch, cluster, job)


def plan_for(
    subject: Subject,
    cluster: ClusterSpec,
    *,
    doing: Doing = nullcontext,
    advise: bool = True,
    request: PlanRequest | None = None,
    **knobs: Any,
) -> ClusterPlan:
    """The composition that is estimated best for the cluster, with the best `verify` of the ranking simulated.

    A choice that does not fit in its simulation is replaced by one that is estimated to need less memory.

    Args:
        doing: a context that is entered around slow work, with its description.
        advise: see `answer`.
        request, knobs: a `PlanRequest`, or the knobs of one; verify=None: the best 3, within `FEW_BYTES` of memory and
            `PLANNING_S` seconds including the search.

    Raises:
        NoFeasiblePlanError: nothing fits; the nearest miss is named, with remedies.
        ArgumentError, StrategyError: an invalid argument.
    """
    from atorch.auto.planner.cluster_search import answer, beside_experts

    until, request = time.monotonic() + PLANNING_S, PlanRequest(**knobs) if request is None else request
    verify = request.verify

    def ask(reserve: float) -> ClusterPlan:
        with doing("searching for the best strategy"):
            plan = answer(subject.profile, cluster, replace(request, reserve=reserve), advise=advise, count=True)
        return replace(plan, notes=(*_notes(subject), *plan.notes), model=subject.model)

    def verified(plan: ClusterPlan) -> ClusterPlan:
        if verify is None:
            return _verified(plan, subject, VERIFIED, SimulationLimits(until, FEW_BYTES), doing)
        return _verified(plan, subject, verify, SimulationLimits(real_bytes=_room()), doing)

    plan = ask(request.reserve)
    plan = _fitting(plan, ask, verified) if verify != 0 else plan
    with doing("comparing with expert parallelism") if advise else nullcontext():
        return replace(plan, notes=(*plan.notes, *beside_experts(PlanJob(subject.profile, cluster, request), plan)))


def cluster_of(source: str | PathLike[str] | ClusterSpec) -> ClusterSpec:
    """The cluster of a description, a file or a ClusterSpec.

    Raises:
        ArgumentError: the name is unknown, or a figure is invalid.
    """
    if isinstance(source, ClusterSpec):
        return source
    if not isinstance(source, (str, PathLike)):
        raise ArgumentError(
            f"cluster is {shown(source)}; give a description such as '8x8xH100-80GB', a file's path or a ClusterSpec"
        )
    return ClusterSpec.load(source if isinstance(source, str) else str(source))


def _of_maker(make: MakeModel, sample_batch: Any, cluster: ClusterSpec, job: dict[str, Any]) -> Subject:
    """Make the model, on the meta device if possible, and trace it."""
    import torch

    from atorch.model.pytree import tensor_bytes

    try:
        with torch.device("meta"):
            made = _module(make())
    except RuntimeError as error:  # torch's, for values of a meta tensor
        logger.info("the model is made for real, it cannot be made on the meta device: %s", error)
        return _traced(_module(make()), sample_batch, cluster, job)
    try:
        return _traced(made, sample_batch, cluster, job)
    except ArgumentError as error:
        size, room = sum(map(tensor_bytes, made.parameters())), _room()
        if size > room:
            raise ArgumentError(
                f"{error}; made for real it would take {format_bytes(size)} of {format_bytes(room / ROOM)}"
            ) from error
        logger.info("the model is made for real: %s", error)
        return _traced(_module(make()), sample_batch, cluster, job)


def _room() -> float:
    import psutil

    return ROOM * float(psutil.virtual_memory().available)


def _verified(
    plan: ClusterPlan, subject: Subject, count: int, allowance: SimulationLimits, doing: Doing
) -> ClusterPlan:
    """The plan with the first `count` of its ranking simulated."""
    chosen = {ranked.strategy.methods: ranked.estimate for ranked in plan.ranking[:count]}
    candidates = [(Strategy(methods), estimate.peak_bytes) for methods, estimate in chosen.items()]
    outcomes = simulated(subject, candidates, plan.cluster.world_size, plan.global_batch, allowance, doing)
    for outcome, estimate in zip(outcomes, chosen.values(), strict=True):
        if "why_not" not in outcome:
            outcome["needed_bytes"] = outcome["peak_bytes"] + estimate.reserve_bytes
            outcome["fits"] = outcome["needed_bytes"] <= plan.usable_bytes
    return replace(plan, simulated=outcomes)


def _fitting(plan: ClusterPlan, ask: PlanForMargin, verified: Callable[[ClusterPlan], ClusterPlan]) -> ClusterPlan:
    """The plan, simulated; while its choice does not fit, a plan for less memory, with notes on rejected choices."""
    usable, plan, given_up = plan.usable_bytes, verified(plan), tuple[str, ...]()
    for left in reversed(range(ASKED_AGAIN + 1)):
        if plan.simulated[0].get("fits", True):
            break
        needed, estimated = plan.simulated[0]["needed_bytes"], plan.estimate.needed_bytes
        shortage = (
            f"{plan.strategy}, simulated, needs {format_bytes(needed)} of the {format_bytes(usable)} that are usable, "
            f"{needed / estimated - 1:.0%} more than estimated"
        )
        limits = (usable * estimated / needed, LESS * estimated) if left else ()
        other = _first_feasible(ask, plan.memory_bytes, limits)
        if other is None:
            return replace(plan, notes=(*plan.notes, f"{shortage}; nothing was found that fits"))
        given_up += (f"{shortage}; what is chosen in its place is estimated to need less",)
        plan = verified(replace(other, usable_bytes=usable, notes=(*given_up, *other.notes)))
    return plan


def _first_feasible(ask: PlanForMargin, memory_bytes: float, limits: Iterable[float]) -> ClusterPlan | None:
    """The plan for the first memory limit (bytes) under which something fits."""
    for limit in limits:
        try:
            return ask(1 - limit / memory_bytes)
        except (NoFeasiblePlanError, StrategyError):
            continue
    return None


def _traced(model: nn.Module, sample_batch: Any, cluster: ClusterSpec, job: dict[str, Any]) -> Subject:
    import torch

    from atorch.auto.job import make_context
    from atorch.distributed.world import World
    from atorch.profiler.trace import trace

    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    arguments = {name: value for name, value in job.items() if name != "of_length"}
    ctx = make_context(model, **arguments, world=world, cluster=cluster)
    batch = ctx.prepare_input(sample_batch, world.device)
    counts = ctx.num_counts(batch)
    of_length: OfLength | None = job.get("of_length")
    if of_length is not None:
        length, make = of_length
        of_length = length, lambda size: ctx.prepare_input(make(size), world.device)
    profile = trace(
        model,
        batch,
        ctx.call_model,
        ctx.loss_func,
        ctx.make_optimizer,
        device_type=cluster.device.type,
        capability=cluster.device.capability,
        num_counts=counts,
        of_length=of_length,
    )
    return Subject(profile, ctx, batch)


def _notes(subject: Subject) -> Iterator[str]:
    if subject.profile.kernels:
        packages = ", ".join(subject.profile.kernels)
        yield f"the figures are those of fused kernels; training without {packages} is much slower: install them"
    if subject.ctx is not None:
        yield from kernel_notes(subject.ctx)


def _module(made: object) -> nn.Module:
    from torch import nn

    if not isinstance(made, nn.Module):
        raise ArgumentError(f"the model's function returned {shown(made)}; it returns a torch.nn.Module")
    return made
