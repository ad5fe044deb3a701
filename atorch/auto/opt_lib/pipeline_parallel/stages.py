"""Application of pipeline_parallel to a model: cuts model and batch, and builds the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atorch.auto.context import Built, Context
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.auto.opt_lib.pipeline_parallel import even_cut, uneven
from atorch.auto.opt_lib.shared.backends import check_pipeline, deepspeed_pipeline
from atorch.auto.opt_lib.shared.model_requirements import changes_modules
from atorch.auto.strategy import Method, Phase, Strategy
from atorch.cost.gemm import peak_flops
from atorch.distributed.collectives import all_or_none, is_fake_world
from atorch.distributed.mesh import BATCH_AXES
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger
from atorch.model.copy import copy_structure
from atorch.model.structure import repeated_blocks, units
from atorch.runtime.data.batches import num_rows, take
from atorch.runtime.loss.reduction import Rule, tolerance_of
from atorch.runtime.memory.recompute import turn_off_caches
from atorch.runtime.pipeline.capture.graph_split import Exported, Speeds, install, uninstall
from atorch.runtime.pipeline.capture.stage_dataflow import Route, route_of
from atorch.runtime.pipeline.engine import Engine
from atorch.runtime.pipeline.pipeline import Pipeline, PipelinedLoss
from atorch.runtime.pipeline.schedules import stages_of
from atorch.runtime.pipeline.stage import ShapeOracle, cut, held_for_loss, holders
from atorch.runtime.pipeline.stage_placement import SharedParameters
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel

SEEN_ROWS = 3
"""Rows of the sample batch that the model runs on while its calls are recorded."""
FP8_ROUNDING = 2e-2  # a tensor's fp8 scale depends on all its rows, so micro-batches round differently


def split(ctx: Context, method: PipelineParallel) -> Context:
    """Replace the context's parts by the stages of this process, and run the schedule inside the loss function."""
    mesh = ctx.need_mesh()
    size, place = mesh.size("pipeline"), mesh.rank("pipeline")
    all_or_none(lambda: check(ctx, method))
    batches = Batches.of(ctx, method)
    turn_off_caches(ctx.root)
    (model,) = ctx.parts
    try:
        named, route, starts = all_or_none(lambda: _plan_cut(ctx, method, model, batches))
        all_or_none(lambda: _check_loss_reads(method, model, held_for_loss(model, named, route, starts), route))
    except BaseException:
        uninstall(model)
        raise
    shared = holders(model, named, route, starts)
    names = tuple(model.state_dict())
    mine = stages_of(place, size, method.pieces)
    make_oracle = oracle_of(ctx, model, named, route)
    parts = cut(model, named, route, starts, mine, ctx.device)
    all_or_none(lambda: _need_training(ctx, parts, mine))
    group = mesh.group("pipeline")
    tolerance = FP8_ROUNDING if ctx.strategy.uses("fp8") else tolerance_of(ctx.compute_dtype)

    def finish(built: Built) -> Built:
        if built.args["use_optim_backward"] or built.loss_func is None:
            raise StrategyError("a pipeline needs loss.backward(); a backend with its own backward cannot take it")
        replicas = mesh.group(*BATCH_AXES)
        engine = Engine(built.parts, method.schedule, group, ctx.device, make_oracle(), replicas)
        pipeline = Pipeline(engine, SharedParameters(shared, built.parts, group, engine.places), names)
        if method.backend == "deepspeed":
            return deepspeed_pipeline(built, ctx, method, pipeline, batches, tolerance, rows_of_a_process(ctx))
        loss_func = PipelinedLoss(
            pipeline,
            built.loss_func,
            batches.count,
            batches.loss_weight,
            tolerance,
            replicas,
            lambda rule: ctx.rescaler(rule, built.dataloader),
        )
        sample = ctx.prepare_input(ctx.sample_batch, ctx.device)
        loss_func.settle(sample, ctx.call_model(pipeline, sample))
        return replace(built, model=pipeline, loss_func=loss_func, rescales_loss=True)

    return replace(ctx, parts=parts).with_finish(finish)


def check(ctx: Context, method: PipelineParallel) -> None:
    """Raise the errors of `split` that need no run of the model: see `Method.check`."""
    for other in ctx.strategy:
        reason = other.against_pipeline(method.schedule)
        if reason is not None and size_of(ctx, "pipeline") > 1:
            raise StrategyError(reason)
    Batches.of(ctx, method)
    if method.backend == "deepspeed":
        check_pipeline(ctx, method)
    if ctx.loss_func is None:
        raise StrategyError("pipeline_parallel runs forward and backward inside loss_func; give auto_accelerate one")
    stages = size_of(ctx, "pipeline") * method.pieces
    for model in ctx.parts:
        blocks = repeated_blocks(model)
        if stages > len(blocks) > 1:
            raise StrategyError(
                f"a pipeline of {stages} stages needs as many repeated blocks, and {type(model).__name__} has "
                f"{len(blocks)}; make the axis pipeline smaller" + (", or interleave less" if method.pieces > 1 else "")
            )
    points = method.split_points
    if points and len(points) != stages - 1:
        raise StrategyError(
            f"split_points has {len(points)} modules, and {stages} stages begin at {stages - 1} besides the first"
        )


def check_at_work(ctx: Context, method: PipelineParallel) -> None:
    """Raise if modules show no cut points, and another method excludes a cut by the graph.

    Methods that replace modules skip the check: the new modules may show cut points.
    """
    reason = against_graph(ctx.strategy)
    if reason is None or method.split_points or ctx.sample_batch is None or changes_modules(ctx):
        return
    (model,) = ctx.parts
    if _CALLS not in ctx.seen:
        ctx.seen[_CALLS] = _calls(ctx, model)
    calls = ctx.seen[_CALLS]
    if isinstance(calls, str):
        raise neither(calls, reason)
    try:
        _need_calls(calls, model, size_of(ctx, "pipeline") * method.pieces)
    except StrategyError as because:
        raise neither(because, reason) from because


_CALLS = "pipeline_parallel: calls of modules between which the model can be cut"


def _calls(ctx: Context, model: nn.Module) -> int | str:
    """The number of calls of units, or the reason why it is unknown."""
    batch = ctx.prepare_input(ctx.sample_batch, next(model.parameters()).device)
    try:
        return len(route_of(model, units(model), _few_rows(batch), ctx.call_model, ctx.loss_func).calls)
    except StrategyError as error:
        return str(error)


def _few_rows(batch: Any) -> Any:
    rows = num_rows(batch=batch)
    return take(batch, 0, min(rows, SEEN_ROWS), rows)


class Batches:
    """The cut of a batch into micro-batches: set by micro_batch if it is in the strategy, else by the pipeline."""

    def __init__(self, method: PipelineParallel, strategy: Iterable[Method], stages: int) -> None:
        other = next((candidate for candidate in strategy if isinstance(candidate, MicroBatch)), None)
        self._method, self._stages = method, stages
        self._size: int | None = None
        self._count = method.micro_batches
        self.loss_weight: Rule = method.loss_weight
        if other is not None:
            self._size = other.size if isinstance(other.size, int) else None
            self._count = None if self._size is not None else other.count or self._count
            self.loss_weight = other.loss_weight if other.loss_weight != "auto" else self.loss_weight

    @classmethod
    def of(cls, ctx: Context, method: PipelineParallel) -> Batches:
        batches = cls(method, ctx.strategy, size_of(ctx, "pipeline"))
        batches.loss_weight = batches.loss_weight if batches.loss_weight != "auto" else ctx.loss_weight
        return batches

    def check(self, rows: int) -> None:
        """Raise StrategyError if a batch of `rows` rows cannot be cut as requested."""
        requested = self._count if self._size is None else f"micro-batches of {self._size} rows"
        if requested is not None and self.count(rows) != (self._count if self._size is None else rows / self._size):
            what = f"{requested} micro-batches" if self._size is None else requested
            raise StrategyError(
                f"{what} do not divide the {rows} rows that a process gets, or not as the schedule "
                f"{self._method.schedule} takes them; choose a divisor"
            )

    def count(self, rows: int) -> int:
        """The number of micro-batches of a batch of `rows` rows: as requested, or the next lower divisor."""
        most = self._count or (rows // self._size if self._size else 4 * self._stages)
        schedule = self._method.schedule
        few = self._stages if schedule == "interleaved" else 0  # it takes fewer micro-batches than stages, too
        divisors = (number for number in range(1, min(most, rows) + 1) if rows % number == 0)
        return max((n for n in divisors if n < few or uneven(self._stages, schedule, n) is None), default=1)


def _plan_cut(
    ctx: Context,
    method: PipelineParallel,
    model: nn.Module,
    batches: Batches,
) -> tuple[Mapping[str, nn.Module], Route, tuple[int, ...]]:
    """The model's units, their calls, and the first call of each stage. A cut by the graph changes the model."""
    if ctx.sample_batch is None:
        raise ArgumentError("pipeline_parallel runs the model on a sample; give a dataset, or a sample_batch")
    stages = ctx.need_mesh().size("pipeline") * method.pieces
    if ctx.make_loader is not None:
        batches.check(rows_of_a_process(ctx))
    batch = ctx.prepare_input(ctx.sample_batch, next(model.parameters()).device)
    rows = num_rows(batch=batch)
    few_rows = _few_rows(batch)
    named = units(model)
    try:
        route = route_of(model, named, few_rows, ctx.call_model, ctx.loss_func)
        _need_calls(len(route.calls), model, stages)
    except StrategyError as error:
        if method.split_points:
            raise
        return cut_by_graph(ctx, method, model, few_rows, stages, error)
    if method.split_points:
        return named, route, _user_starts(route, method.split_points)
    called = [call.unit for call in route.calls]
    return named, route, even_cut(ctx, method, model, called, batch, batches.count(rows))


def _check_loss_reads(method: PipelineParallel, model: nn.Module, names: Sequence[str], route: Route) -> None:
    """Warn of parameters that the last stage holds only for the loss function, which sees a process's first stage."""
    if method.pieces == 1 and method.backend == "torch":
        if names:
            logger.warning(
                "the loss function reads parameters of other stages, such as %s: the last stage holds them too, with "
                "gradients and optimizer states, %s of parameters. The optimizer's weight_decay costs nothing",
                names[0],
                format_bytes(sum(p.numel() * p.element_size() for p in map(model.get_parameter, names))),
            )  # fmt: skip
    elif route.read_by_loss:
        raise StrategyError(
            f"the loss function reads {min(route.read_by_loss)} of the model itself, of which it sees one piece where "
            f"{method} runs it. Take the schedule 1f1b and the backend torch. Or compute the term in the model's "
            "forward and return it, or use the optimizer's weight_decay"
        )


def _need_calls(num_calls: int, model: nn.Module, stages: int) -> None:
    """Raise if the model calls fewer modules than there are stages."""
    if num_calls < stages:
        raise StrategyError(
            f"a pipeline of {stages} stages is cut between as many calls of modules with parameters, and "
            f"{type(model).__name__} has {num_calls}; make the axis pipeline smaller"
        )


def _user_starts(route: Route, points: tuple[str, ...]) -> tuple[int, ...]:
    """The first call of each stage, at the user's split points."""
    starts = (0, *(route.beginning(name) for name in points))
    if list(starts) != sorted(set(starts)):
        raise StrategyError(
            f"split_points has {', '.join(points)}, which are called in another order, or nothing before the first; "
            "name modules in the order in which the model calls them"
        )
    return starts


def rows_of_a_process(ctx: Context) -> int:
    mesh = ctx.need_mesh()
    assert ctx.make_loader is not None
    loader = ctx.make_loader(mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES))
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return int(size or num_rows(batch=ctx.sample_batch))


def _need_training(ctx: Context, parts: tuple[nn.Module, ...], mine: tuple[int, ...]) -> None:
    """Raise if no parameter of this process is trainable, so that its optimizer would be empty."""
    trains = any(parameter.requires_grad for part in parts for parameter in part.parameters())
    if ctx.make_optimizer is not None and not trains:
        raise StrategyError(
            f"stage {mine[0]} has no trainable parameter, and its optimizer nothing to do; choose other split_points"
        )


def oracle_of(ctx: Context, model: nn.Module, units: Iterable[str], route: Route) -> Callable[[], ShapeOracle | None]:
    """Copy a model before it is cut; return a function that makes the shape oracle once the stages are built.

    The oracle is None if other processes exist. Methods that apply to stages apply to the copy as well.
    """
    if not is_fake_world():
        return lambda: None
    whole = copy_structure(model, torch.empty_like)
    named = {name: whole.get_submodule(name) for name in units}
    (part,) = cut(whole, named, route, (0,), (0,), ctx.device)

    def ready() -> ShapeOracle:
        job = replace(ctx, root=part, parts=(part,))
        for method in ctx.strategy:
            if method.phase > Phase.SPLIT:
                job = method.apply(job)
        return ShapeOracle(job.parts[0])

    return ready


_BY_MODULES = (Phase.TENSOR, Phase.RECOMPUTE, Phase.COMPILE)
"""Phases whose methods act on calls of modules, which a graph does not contain."""


def cut_by_graph(
    ctx: Context, method: PipelineParallel, model: nn.Module, batch: Any, stages: int, because: StrategyError
) -> tuple[dict[str, nn.Module], Route, tuple[int, ...]]:
    """Make `model` run by its graph, in place; return the segments by name, their calls, and stage starts.

    because: the reason why modules show no cut points.

    Raises:
        StrategyError: the graph cannot be exported or cut either; gives both reasons. The model is unchanged.
    """
    reason = against_graph(ctx.strategy)
    if reason is not None:
        raise neither(because, reason) from because
    try:
        named = install(model, _exported(ctx, method, model, stages), stages)
        route = route_of(model, named, batch, ctx.call_model, ctx.loss_func)
    except StrategyError as error:
        uninstall(model)
        raise neither(because, error) from error
    logger.info("the pipeline is cut by the graph that torch.export gives, as modules do not tell where: %s", because)
    return named, route, tuple(range(stages))


def against_graph(strategy: Strategy) -> str | None:
    """The reason why a method of the strategy excludes a pipeline that is cut by its graph, or None."""
    for method in strategy:
        if method.phase in _BY_MODULES or method.acts_in_calls:
            return f"{method.name} acts where modules are called, which a graph does not do; leave it out"
    return None


def neither(because: object, reason: object) -> StrategyError:
    """The error of a model that can be cut neither between its modules nor by its graph, with both reasons."""
    return StrategyError(f"{because}. Nor can the model be cut by its graph: {reason}")


def _exported(ctx: Context, method: PipelineParallel, model: nn.Module, stages: int) -> Exported:
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), ctx.cluster.device

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=ctx.device)

    source = copy_structure(model, fake)
    reached = peak_flops(device, "float32"), device.memory_bandwidth * device.efficiency.traffic
    return Exported(source, mode, stages, Speeds(*reached))
