"""Cut points for pipeline_parallel if the user gave none: balanced by traced time, within memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from torch import nn

from atorch.auto.context import Context
from atorch.auto.strategy import Phase
from atorch.cost import Cost
from atorch.cost.pipeline_stages import in_flight
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.profiler.capture.unit_costs import UnitCost, unit_costs
from atorch.runtime.pipeline.capture.partition import partition

if TYPE_CHECKING:
    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel

_FOLDED = (Phase.PRECISION, Phase.RECOMPUTE, Phase.SHARD)
"""Phases whose methods change a unit's cost afterwards; methods that split it are in the traced model already."""


def even_cut(
    ctx: Context, method: PipelineParallel, model: nn.Module, called: Sequence[str], batch: Any, micro_batches: int
) -> tuple[int, ...]:
    """The first call of each stage, in the cut whose slowest stage is fastest, within a GPU's memory.

    called: the units in the order of their calls. Tied units share a stage if that costs no time. If no cut fits in
    memory by the estimate, a warning is logged, and time alone decides.
    """
    assert ctx.loss_func is not None
    stages = ctx.need_mesh().size("pipeline") * method.pieces
    fold = partial(_folded, ctx, micro_batches)
    costs = unit_costs(model, batch, ctx.call_model, ctx.loss_func, ctx.cluster.device, fold=fold)
    if [unit.name for unit in costs] != called:
        logger.info("what units cost is not known as they are called; stages have even shares of the parameters")
        sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in called]
        return partition([float(size) for size in sizes], stages, names=called)
    seconds, tied = [unit.seconds for unit in costs], list(tied_calls(model, called))
    if ctx.device.type == "cuda":
        try:
            return _within_memory(ctx, method, costs, micro_batches, tied)
        except StrategyError as error:
            logger.warning("%s; by the estimate, which need not be right: the pipeline is cut for time alone", error)
    return partition(seconds, stages, tied=tied, names=called)


def _within_memory(
    ctx: Context,
    method: PipelineParallel,
    costs: Sequence[UnitCost],
    micro_batches: int,
    tied: Sequence[tuple[int, int]],
) -> tuple[int, ...]:
    size = ctx.need_mesh().size("pipeline")
    piped = Cost(
        segments=(), traced_batch=1.0, batch_size=1.0, num_micro_batches=float(micro_batches), stages=size,
        interleave=method.pieces, schedule=method.schedule,
    )  # fmt: skip
    return partition(
        [unit.seconds for unit in costs],
        size * method.pieces,
        [unit.held_bytes for unit in costs],
        ctx.cluster.device.memory_bytes / method.pieces,
        activations=[unit.kept_bytes for unit in costs],
        in_flight=[in_flight(piped, index % size) for index in range(size * method.pieces)],
        tied=tied,
        names=[unit.name for unit in costs],
    )


def _folded(ctx: Context, micro_batches: int, cost: Cost) -> Cost:
    cost = cost.but(axes=dict(ctx.need_mesh().slices))
    for method in ctx.strategy:
        if method.phase in _FOLDED:
            cost = method.cost(cost)
    return cost.but(num_micro_batches=float(micro_batches))


def tied_calls(model: nn.Module, called: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Pairs of calls whose units share a parameter."""
    parameter_ids = [{id(parameter) for parameter in model.get_submodule(name).parameters()} for name in called]
    for one, other in combinations(range(len(called)), 2):
        if not parameter_ids[one].isdisjoint(parameter_ids[other]):
            yield one, other
