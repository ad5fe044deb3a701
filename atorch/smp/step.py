"""`smp.step`: runs a function of a training script once for every micro-batch, around one call of the model.

Before the first forward pass it partitions the model: it broadcasts the first replica's parameters and buffers, then
runs deferred loads and hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import nn

from atorch.cluster.spec import ClusterSpec
from atorch.distributed import world
from atorch.distributed.collectives import all_or_none, call_on_all_ranks, from_rank_zero
from atorch.distributed.fingerprints import Fact, Facts, facts_of_call, facts_of_optimizer
from atorch.errors import ArgumentError, AtorchError, check_bools, shown
from atorch.logs import logger, verbose_logging
from atorch.model.copy import duplicate
from atorch.model.pytree import map_tensors
from atorch.model.state import preserved_state
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.memory.recompute import turn_off_caches
from atorch.runtime.pipeline.capture.stage_dataflow import Reads, Route, route_of
from atorch.runtime.pipeline.engine import Engine
from atorch.runtime.pipeline.stage import cut, holders
from atorch.runtime.pipeline.stage_placement import PlacedSchedule, SharedParameters, by_torch
from atorch.smp.activation_checkpointing import record_places
from atorch.smp.config import Config
from atorch.smp.model import DistributedModel
from atorch.smp.model_creation import delayed_values, fill
from atorch.smp.partitioning import PartitionChoice, auto_units, divided_by_cost, divided_by_hand, units_by_hand
from atorch.smp.session import Session, session, tracing
from atorch.smp.steps.averaging import Averaging, PartSync, check_degrees, sharded
from atorch.smp.steps.micro_batch_run import MicroBatchRun
from atorch.smp.steps.precision import half_of, halve, widen_output
from atorch.smp.steps.runner import Runner
from atorch.smp.steps.slicing import Slicing, StepArguments, agree_on_step, broadcast_first_batch, outputs_of
from atorch.smp.tensor.split import TensorSplit, split_marked

F = TypeVar("F", bound=Callable[..., Any])


@overload
def step(function: F, /) -> F: ...
@overload
def step(
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[F], F]: ...
def step(
    function: Any = None, /, *, non_split_inputs: Collection[str] | None = (),
    input_split_axes: Mapping[str, int] | None = None, detach_outputs: bool = True,
) -> Any:  # fmt: skip
    """Run a function in micro-batches; it calls the model once and, to train, `model.backward`.

    Every tensor in its arguments, at any depth, is cut along its first axis into the configured number of
    micro-batches. Objects with a method `smp_slice(num_microbatches, microbatch, axis)` cut themselves. Every returned
    tensor becomes a `StepOutput`, the same on all processes of a pipeline. The function runs whole on the last stage of
    the model, elsewhere up to its call of the model.

    Args:
        non_split_inputs: names of arguments that every micro-batch gets whole.
        input_split_axes: the axis along which tensors of an argument are cut, by its name.
        detach_outputs: return tensors without their graphs, which only a process with the whole model can keep.

    Raises:
        ArgumentError, StrategyError: an argument is invalid; on a call, also an exception that the function raised on
            any process, which the error names.
    """
    if function is None:
        return functools.partial(
            step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes, detach_outputs=detach_outputs
        )
    if not callable(function):
        raise ArgumentError(f"smp.step was given {shown(function)}; give a function, and its options by name")
    check_bools("smp.step", detach_outputs=detach_outputs)
    slicing = Slicing(function, non_split_inputs or (), input_split_axes or {})

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        owner = session()
        return outputs_of(_run(owner, _model(owner), function, slicing, (args, kwargs), detach_outputs))

    return run


def _model(owner: Session) -> DistributedModel:
    model = owner.model
    if not isinstance(model, DistributedModel):
        raise ArgumentError("a function with @smp.step was called, and there is no model; make a smp.DistributedModel")
    if model.runner is not None and model.runner.ended_by is not None:
        raise ArgumentError(model.runner.ended_by)
    if model.in_a_step:
        raise ArgumentError("a function with @smp.step was called inside another; call it outside")
    return model


def _run(
    owner: Session, model: DistributedModel, function: Callable[..., Any], slicing: Slicing, arguments: StepArguments,
    detach: bool,
) -> list[Any]:  # fmt: skip
    def cut() -> list[StepArguments]:
        batch = arguments
        if owner.mesh.size("tensor") > 1 and not owner.config.prescaled_batch:
            batch = slicing.gathered(batch, owner.mesh.group("tensor"))
        pieces = slicing.cut(batch, owner.config.microbatches)
        return [map_tensors(lambda leaf: leaf.to(owner.device, non_blocking=True), piece) for piece in pieces]

    name = f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"
    start = agree_on_step(owner, cut, name, model.training)
    if not start.is_alike:
        start = broadcast_first_batch(owner, start)
    runner = model.runner or partition(owner, model, function, start.pieces[0])
    return runner.run(function, start, detach)


Function = Callable[..., Any]


def partition(owner: Session, model: DistributedModel, function: Function, sample: StepArguments) -> Runner:
    """Partition the model by a micro-batch of the first step. All processes call this together.

    Raises:
        StrategyError, ArgumentError: the model, the function or the partitions do not allow it; on all processes, with
            the model unchanged.
    """
    mesh, config, whole = owner.mesh, owner.config, model.module

    def model_facts() -> Mapping[str, Facts]:
        facts = dict(facts_of_call(whole, **vars(model.options)))
        return facts | ({} if owner.optimizer is None else {"optimizer": facts_of_optimizer(owner.optimizer)})

    call_on_all_ranks("smp.DistributedModel", model_facts, lambda: None)
    check_degrees(config)
    seed = from_rank_zero(torch.initial_seed())
    turn_off_caches(whole)
    split = _tensor_split(owner, model, function, sample)
    units, route, division = call_on_all_ranks(
        "smp.DistributedModel", dict, lambda: _divided(owner, model, function, sample), partial(_call_facts, config)
    )
    division = from_rank_zero(division)  # measured times differ between processes
    values = all_or_none(lambda: delayed_values(whole))
    blank = all_or_none(lambda: _blank_copy(whole))
    faults: list[Exception] = []
    placed = PlacedSchedule(division.places, config.active_microbatches, config.pipeline == "simple")
    if len(division.places) == 1:
        parts: tuple[nn.Module, ...] = (whole,)
    else:
        shared = holders(whole, units, route, division.starts)
        local_stages = [stage for stage, place in enumerate(division.places) if place == mesh.rank("pipeline")]
        parts = cut(whole, units, route, division.starts, local_stages, owner.device, shares=True)
        for part in parts:
            record_places(part, division.partition_of)
    fill(parts, owner.device, values)
    for part in parts:
        part.to(owner.device)
    replicas = mesh.group("data", "zero")
    broadcast([(0, [tensor.detach() for part in parts for tensor in (*part.parameters(), *part.buffers())])], replicas)
    half = half_of(config)
    fp32_values = None if half is None else halve(parts, half)
    for part in parts if half is not None else ():
        widen_output(part)
    passes = sharded(whole, mesh, half) if config.sharded_data_parallel_degree > 1 else None
    averaging = None if passes is not None else _averaging(owner, model, parts)
    engine = ties = None
    if len(division.places) > 1:
        reductions = [PartSync(part, averaging, faults.append) for part in parts]
        group = mesh.group("pipeline")
        schedule = by_torch(placed, config.microbatches)
        engine = Engine(parts, schedule, group, owner.device, reductions=reductions)
        ties = SharedParameters(shared, parts, group, division.places)
    runner = Runner(model, owner, parts, placed, engine, ties, averaging, passes, faults, blank, seed)
    model.set_partitioned(runner, division, split)
    if owner.mesh.size("pipeline") > 1:
        with verbose_logging(True):
            logger.info("the model was partitioned:\n%s", division)
    if owner.optimizer is not None:
        owner.optimizer.follow(model, fp32_values)
    all_or_none(model.run_pending)
    return runner


def _blank_copy(model: nn.Module) -> nn.Module:
    """A copy of a model with parameters on the meta device."""
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad)
        for tensor in model.parameters()
    }
    return duplicate(model, memo)


def _tensor_split(owner: Session, model: DistributedModel, function: Function, sample: StepArguments) -> TensorSplit:
    if owner.mesh.size("tensor") == 1:
        return TensorSplit()
    call = all_or_none(lambda: _call(model, function, sample))
    return split_marked(model.module, lambda: model.module(*call[0], **call[1]), owner.mesh)


def _averaging(owner: Session, model: DistributedModel, parts: tuple[nn.Module, ...]) -> Averaging | None:
    group = owner.mesh.group("data", "zero")
    if group.size() == 1:
        return None
    options = model.options
    averaging = Averaging(parts, group, bucket_cap_mb=options.bucket_cap_mb, as_views=options.gradient_as_bucket_view)
    averaging.comm_hook = model.comm_hook
    return averaging


def _divided(
    owner: Session, model: DistributedModel, function: Function, sample: StepArguments
) -> tuple[Mapping[str, nn.Module], Route, PartitionChoice]:
    config, whole = owner.config, model.module
    count = config.pipeline_parallel_degree
    if count == 1:
        return {}, Route((), frozenset(), frozenset(), frozenset()), PartitionChoice({}, (0,), (0,), {})
    units = auto_units(whole, count) if config.auto_partition else units_by_hand(whole, config.default_partition)
    call, route = _watched(model, units, function, sample)
    if not config.auto_partition:
        return units, route, divided_by_hand(route, units, count, config.default_partition)
    device = ClusterSpec.detect(world.init(), measure=False).device
    return units, route, divided_by_cost(route, units, whole, call, device, config, model.options)


def _call_facts(config: Config, divided: tuple[Mapping[str, nn.Module], Route, PartitionChoice]) -> Mapping[str, Facts]:
    """Facts that must be equal on all processes: the calls of units and, if set by hand, their partitions."""
    _, route, division = divided
    where = {} if config.auto_partition else division.partition_of
    on = {unit: f"on partition {place}" for unit, place in where.items()}
    facts = (Fact(call.unit, on.get(call.unit, "")) for call in route.calls)
    return {"calls": {f"call {number} of the model's modules": fact for number, fact in enumerate(facts)}}


def _watched(
    model: DistributedModel, units: Mapping[str, nn.Module], function: Function, sample: StepArguments
) -> tuple[StepArguments, Route]:
    """Capture the function's call of the model, the data flow between its modules, and the function's reads of it.

    The model runs on fake tensors if possible. The function runs for real, with zeros for the model's output, so that
    it stores no fake tensors.
    """
    whole, call = model.module, _call(model, function, sample)
    outputs = _Outputs()

    def run(module: nn.Module, call: StepArguments) -> Any:
        outputs.append(module(*call[0], **call[1]))
        return outputs[-1]

    route = route_of(whole, units, call, run)
    zeros = map_tensors(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype), outputs[-1])
    after = MicroBatchRun(function, _on_model_device(whole, sample), 0, _Giving(zeros), {})
    reads = Reads(whole)
    try:
        with reads:
            _trace(model, after)
    except AtorchError:
        raise
    except Exception as error:  # the function may fail in any way on zeros; real batches show its faults
        logger.info("what the function of smp.step reads of the model is known up to where it fails: %s", error)
    return call, replace(route, read_by_loss=frozenset(reads.found) - route.output_needs)


def _call(model: DistributedModel, function: Function, sample: StepArguments) -> StepArguments:
    """The arguments with which the function calls the model."""
    body = MicroBatchRun(function, _on_model_device(model.module, sample), 0, None, {})
    _trace(model, body)
    if body.call is None:
        raise ArgumentError("the function of smp.step ended without calling the model; let it call it once")
    return body.call


def _on_model_device(whole: nn.Module, sample: StepArguments) -> StepArguments:
    """A micro-batch on the device of the whole model; on the host if parameters are delayed."""
    device = next(whole.parameters()).device
    if device.type == "meta":
        device = torch.device("cpu")
    moved: StepArguments = map_tensors(lambda leaf: leaf.to(device), sample)
    return moved


def _trace(model: DistributedModel, body: MicroBatchRun) -> None:
    with torch.no_grad(), preserved_state(model.module), model.serving(body), tracing():
        body.run()


class _Outputs(list[Any]):
    """Outputs of the model; a deep copy of an object that refers to this list shares it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Outputs:
        return self


class _Giving(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output
