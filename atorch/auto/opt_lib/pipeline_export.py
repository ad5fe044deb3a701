"""Cuts a model for pipeline_parallel by the graph of its forward pass, where its modules do not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atorch.auto.context import Context
from atorch.auto.strategy import Phase, Strategy
from atorch.cost.products import peak_flops
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.profiler.copying import copy_structure
from atorch.runtime.pipeline.exported import Exported, Speeds, install, uninstall
from atorch.runtime.pipeline.observing import route_of
from atorch.runtime.pipeline.route import Route

if TYPE_CHECKING:
    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel

_BY_MODULES = (Phase.TENSOR, Phase.RECOMPUTE, Phase.COMPILE)
"""Phases whose methods act where modules are called; a graph calls none."""


def cut_by_graph(
    ctx: Context, method: PipelineParallel, model: nn.Module, batch: Any, stages: int, because: StrategyError
) -> tuple[dict[str, nn.Module], Route, tuple[int, ...]]:
    """Lets `model` run by its graph, in place: the segments by name, their calls, and where stages begin.

    because: why modules do not tell where to cut.

    Raises:
        StrategyError: its graph cannot be had or cut either, with both reasons; the model is as it was.
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


def against_graph(strategy: Strategy | None) -> str | None:
    """Why a method of the strategy cannot be beside a pipeline that is cut by its graph, or None."""
    for each in strategy or ():
        if each.phase in _BY_MODULES or each.name in ("amp_native", "fsdp", "zero2", "offload", "chunk"):
            return f"{each.name} acts where modules are called, which a graph does not do; leave it out"
    return None


def neither(because: object, reason: object) -> StrategyError:
    """The error of a model that can be cut neither by its modules, because of one thing, nor by its graph."""
    return StrategyError(f"{because}. Nor can the model be cut by its graph: {reason}")


def _exported(ctx: Context, method: PipelineParallel, model: nn.Module, stages: int) -> Exported:
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), ctx.cluster.device

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=ctx.device)

    source = copy_structure(model, fake)
    reached = peak_flops(device, "float32"), device.memory_bandwidth * device.efficiency.traffic
    return Exported(source, mode, stages, Speeds(*reached))
