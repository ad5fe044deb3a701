"""The cost of each unit of a model in a step, so that a pipeline can be cut between units.

One forward pass on fake tensors, or a real one if the model cannot run on fakes, is recorded unit by unit. A unit's
seconds, forward and backward, are the planner's estimates on the device, so pipeline stages are balanced by the
planner's own measure. The strategy's precision and recomputation are included. Operations between two units count with
the later one, since a stage receives the output of units and continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from atorch.cluster.spec import DeviceSpec
from atorch.cost import Cost, Segment
from atorch.cost.comm import tokens_share
from atorch.cost.gemm import ProductTimes
from atorch.cost.kernels import seconds_of_copy
from atorch.cost.state import plain_cost
from atorch.model.structure import repeated_blocks, units
from atorch.profiler.trace import trace


@dataclass(frozen=True, slots=True)
class UnitCost:
    name: str
    seconds: float  # of a micro-batch, forward and backward
    held_bytes: float  # the unit's parameters, their gradients and optimizer states
    kept_bytes: float  # activations of a micro-batch that wait for its backward


def unit_costs(
    model: nn.Module,
    sample_batch: Any,
    call_model: Callable[[nn.Module, Any], Any],
    loss_func: Callable[[Any, Any], Any] | None,
    device: DeviceSpec,
    *,
    fold: Callable[[Cost], Cost] | None = None,
    parts: Mapping[str, nn.Module] | None = None,
) -> tuple[UnitCost, ...]:
    """Costs of every call of a unit, in the order of execution; a unit that is called twice appears twice.

    Args:
        sample_batch: the batch of `call_model(model, batch)` and `loss_func(batch, output)`, on any device.
        fold: applies the strategy to the cost of plain training, including micro-batches; None: plain training.
        parts: the units by name; None: those of `model.structure.units`.

    Raises:
        ArgumentError: the model has no parameters, cannot be copied, or is on the meta device and cannot run on fakes.
    """
    profile = trace(
        model,
        sample_batch,
        call_model,
        loss_func,
        device_type=device.type,
        capability=device.capability,
        parts=parts or units(model),
    )
    cost, blocks = plain_cost(profile), repeated_blocks(model)
    if fold is not None:
        cost = fold(cost)
    costs: list[UnitCost] = []
    waiting: UnitCost | None = None
    for segment in cost.segments:
        unit = _unit_cost(cost, replace(segment, is_block=segment.name in blocks), device)
        if segment.name:
            costs.append(_with(unit, waiting))
            waiting = None
        else:
            waiting = unit
    if costs:
        costs[-1] = _with(costs[-1], waiting)
    return tuple(costs)


def _with(unit: UnitCost, other: UnitCost | None) -> UnitCost:
    if other is None:
        return unit
    return UnitCost(
        unit.name, unit.seconds + other.seconds, unit.held_bytes + other.held_bytes, unit.kept_bytes + other.kept_bytes
    )


def _unit_cost(cost: Cost, segment: Segment, device: DeviceSpec) -> UnitCost:
    """Cost of a unit. Shared parameters count in every unit that holds them; on a GPU, running hides launches."""
    computed, share = seconds_of_copy(cost, segment, ProductTimes(device)), tokens_share(cost, segment)
    busy = computed.matmul_s + computed.traffic_s
    seconds = max(busy, computed.launch_s) if device.type == "cuda" else busy + computed.launch_s
    tied = segment.tied_params if segment.name else 0.0
    elements, trained = cost.local_params(segment) + tied, cost.local_trainable(segment) + tied
    again = cost.recompute if segment.is_block and cost.recompute_keeps == "inputs" else 0.0
    kept = again * min(segment.input_bytes, segment.saved_bytes) + (1.0 - again) * segment.saved_bytes
    states = cost.grad_itemsize / cost.grad_shards
    states += (cost.optim_itemsize + cost.master_itemsize) / cost.optim_shards
    return UnitCost(
        name=segment.name,
        seconds=seconds,
        held_bytes=elements * cost.param_itemsize / cost.param_shards + trained * states,
        kept_bytes=share * cost.activation_scale * kept,
    )
