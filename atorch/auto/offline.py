"""Plans for clusters that are not here: a model is traced without memory, compositions scored, the best simulated.

Nothing is sent, measured or trained. A model may be given as a function that makes it: it is then made on the meta
device, where 405 billion parameters take no room, and for real only where it cannot be made or traced there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from atorch.auto.arguments import meant, positioned
from atorch.auto.context import Context
from atorch.auto.job import make_context
from atorch.auto.planner.estimate import RESERVE
from atorch.auto.strategy import Strategy
from atorch.cluster import ClusterSpec
from atorch.cost import ModelProfile
from atorch.distributed.world import World
from atorch.errors import ArgumentError, shown
from atorch.logs import logger
from atorch.profiler.tensors import tensor_bytes
from atorch.profiler.trace import trace
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.planner.cluster_plan import ClusterPlan

MakeModel = Callable[[], nn.Module]
MAX_SIMULATED = 32
_OPTIONS = ("global_batch", "excluded", "included", "fixed", "objective", "reserve", "verify")
_JOB = ("loss_func", "optim_func", "optim_args", "optim_param_func", "prepare_input", "model_input_format")
ROOM = 0.25  # of the memory that is free, what a model that must be made for real may take


@dataclass(frozen=True)
class Subject:
    """What is planned for: a model in numbers, and the job that it was traced in where it can be simulated."""

    profile: ModelProfile
    ctx: Context | None = None
    batch: Any = None


def plan_elsewhere(model: Any, given: Sequence[Any], cluster: Any, keywords: Mapping[str, Any]) -> ClusterPlan:
    """What `plan` does with a cluster.

    Raises:
        ArgumentError: an argument that there is not, or that does not hold.
    """
    wanted = {**keywords, **positioned(given, ("sample_batch",), keywords)}
    sample_batch = wanted.pop("sample_batch", None)
    options = {name: wanted.pop(name) for name in _OPTIONS if name in wanted}
    for name in wanted:
        if name not in _JOB:
            known = meant(name, (*_OPTIONS, *_JOB, "sample_batch"))
            raise ArgumentError(f"plan for a cluster has no argument {name!r}; {known}")
    spec = cluster_of(cluster)
    return plan_for(subject_of(model, sample_batch, spec, **wanted), spec, **options)


def subject_of(
    model: nn.Module | MakeModel | ModelProfile, sample_batch: Any, cluster: ClusterSpec, **job: Any
) -> Subject:
    """The model in numbers, by tracing it on `sample_batch`.

    Args:
        model: a module, a function that makes one, or a profile, which needs no tracing and no `sample_batch`.
        job: arguments of `make_context` beside the model.

    Raises:
        ArgumentError: the model cannot be traced, or an argument does not hold.
    """
    if isinstance(model, ModelProfile):
        if job or sample_batch is not None:
            raise ArgumentError(f"{', '.join(job) or 'sample_batch'} is given with a profile, which was traced before")
        return Subject(model)
    if sample_batch is None:
        raise ArgumentError("a plan for a cluster traces the model, which needs a sample_batch; give one")
    if isinstance(model, nn.Module):
        return _traced(model, sample_batch, cluster, job)
    if not callable(model):
        raise ArgumentError(f"model is {shown(model)}; give a torch.nn.Module or a function that makes one")
    return _of_maker(model, sample_batch, cluster, job)


def plan_for(
    subject: Subject,
    cluster: ClusterSpec,
    *,
    global_batch: int | None = None,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Any = None,
    objective: str = "step_time",
    reserve: float = RESERVE,
    verify: int = 3,
    breadth: int | None = None,
    advise: bool = True,
) -> ClusterPlan:
    """The best composition for the cluster by estimate, and the best `verify` of the ranking simulated.

    Args:
        global_batch: samples of a step on all devices together; None for the traced batch on every device.
        fixed: what `Strategy.of` takes: compositions have exactly these methods.
        reserve: share of a device's memory that nothing may use.
        breadth, advise: see `answer`.

    Raises:
        NoFeasiblePlanError: nothing fits; the nearest miss is named, with what would make it fit.
        ArgumentError, StrategyError: an argument does not hold.
    """
    batch = subject.profile.batch_size * cluster.world_size if global_batch is None else global_batch
    _check(batch, reserve, verify)
    from atorch.auto.planner.answer import answer

    plan = answer(
        subject.profile,
        cluster,
        global_batch=batch,
        excluded=excluded,
        included=included,
        fixed=None if fixed is None else Strategy.of(fixed),
        objective=objective,
        reserve=reserve,
        breadth=breadth,
        advise=advise,
    )
    return _verified(plan, subject, verify) if verify else plan


def cluster_of(source: str | PathLike[str] | ClusterSpec) -> ClusterSpec:
    """The cluster that a description, a file or a ClusterSpec means.

    Raises:
        ArgumentError: there is none of that name, or a figure does not hold.
    """
    if isinstance(source, ClusterSpec):
        return source
    if not isinstance(source, (str, PathLike)):
        raise ArgumentError(
            f"cluster is {shown(source)}; give a description such as '8x8xH100-80GB', a file's path or a ClusterSpec"
        )
    return ClusterSpec.load(source if isinstance(source, str) else str(source))


def _of_maker(make: MakeModel, sample_batch: Any, cluster: ClusterSpec, job: dict[str, Any]) -> Subject:
    """The model that is made, on the meta device unless something in it asks for values."""
    try:
        with torch.device("meta"):
            made = _module(make())
    except RuntimeError as error:  # torch's, of values that a meta tensor has not
        logger.info("the model is made for real, it cannot be made on the meta device: %s", error)
        return _traced(_module(make()), sample_batch, cluster, job)
    try:
        return _traced(made, sample_batch, cluster, job)
    except ArgumentError as error:
        size, room = sum(map(tensor_bytes, made.parameters())), psutil.virtual_memory().available
        if size > room * ROOM:
            raise ArgumentError(
                f"{error}; made for real it would take {format_bytes(size)} of {format_bytes(room)}"
            ) from error
        logger.info("the model is made for real: %s", error)
        return _traced(_module(make()), sample_batch, cluster, job)


def _verified(plan: ClusterPlan, subject: Subject, count: int) -> ClusterPlan:
    """The plan with the first of its ranking simulated, and beside them the best that can be applied today."""
    from atorch.auto.verify import simulated

    best = [] if plan.best_applicable is None else [plan.best_applicable]
    chosen = {each.strategy.methods: each.estimate.peak_bytes for each in (*plan.ranking[:count], *best)}
    candidates = [(Strategy(methods), peak) for methods, peak in chosen.items()]
    return replace(plan, simulated=simulated(subject, candidates, plan.cluster.world_size, plan.global_batch))


def _traced(model: nn.Module, sample_batch: Any, cluster: ClusterSpec, job: dict[str, Any]) -> Subject:
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    ctx = make_context(model, **job, world=alone, cluster=cluster)
    batch = ctx.prepare_input(sample_batch, alone.device)
    kind = cluster.device.type
    profile = trace(model, batch, ctx.call_model, ctx.loss_func, ctx.make_optimizer, device_type=kind)
    return Subject(profile, ctx, batch)


def _module(made: object) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ArgumentError(f"the model's function returned {shown(made)}; it returns a torch.nn.Module")
    return made


def _check(global_batch: object, reserve: object, verify: object) -> None:
    if not isinstance(global_batch, int) or global_batch < 1:
        raise ArgumentError(f"global_batch is {shown(global_batch)}; it is the samples of a step, at least 1")
    if not isinstance(reserve, (int, float)) or not 0 <= reserve < 1:
        raise ArgumentError(f"reserve is {shown(reserve)}; it is the share of a device's memory to keep free, as 0.08")
    if not isinstance(verify, int) or not 0 <= verify <= MAX_SIMULATED:
        raise ArgumentError(f"verify is {shown(verify)}; it is how many are simulated, from 0 to {MAX_SIMULATED}")
