"""Partitions of modules: by the contexts in which modules were created, or by cost.

A model is cut between calls of its *units*. By hand a unit is the outermost module whose parameters are all on one
partition. Automatically it is a repeated block, or outside the blocks the outermost module with parameters. Units that
share a parameter, and all calls of one unit, are on one partition. A stage is a run of calls on one partition; a
partition to which execution returns has several stages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from atorch.cluster.spec import DeviceSpec
from atorch.errors import ArgumentError, StrategyError, shown
from atorch.logs import logger
from atorch.model.meta_device import has_meta
from atorch.model.pytree import tensor_bytes
from atorch.model.state import preserved_state
from atorch.model.structure import units as units_of
from atorch.profiler.unit_costs import unit_costs
from atorch.runtime.pipeline.capture.partition import partition as least_largest
from atorch.runtime.pipeline.capture.stage_dataflow import Route
from atorch.runtime.pipeline.stage import STAGE
from atorch.smp.config import Config, ModelOptions
from atorch.smp.session import session
from atorch.smp.steps.slicing import StepArguments
from atorch.units import format_bytes

MARK = "_smp_partition"
"""The module attribute with the index of the partition in whose context the module was created."""


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Put modules that are created inside on partition `index`; the innermost context decides.

    It has no effect with `auto_partition`. Modules created outside all contexts are on `default_partition`.

    Raises:
        ArgumentError: there is no such partition, or `smp.init` has not been called.
    """
    _check_index(index, "smp.partition")

    def mark(module: nn.Module, name: str, parameter: Any) -> None:
        if all(present is None for present in module._parameters.values()):  # its first one: it is being created
            vars(module)[MARK] = index  # torch calls the hook of the innermost context last

    with register_module_parameter_registration_hook(mark):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Put an existing module and its submodules on partition `index`, as if created in that context.

    Raises:
        ArgumentError: there is no such partition, `module` is not a module, or the model is partitioned already.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"smp.set_partition was given {shown(module)}; give a torch.nn.Module")
    if any(STAGE in vars(inner) for inner in module.modules()):
        raise ArgumentError("smp.set_partition was called after the first smp.step, which partitions; call it before")
    _check_index(index, "smp.set_partition")
    for inner in module.modules():
        vars(inner)[MARK] = index


def _check_index(index: Any, call: str) -> None:
    count = session().config.pipeline_parallel_degree
    if type(index) is not int or not 0 <= index < count:
        raise ArgumentError(
            f"{call} was given {index!r}, and there are {count} partitions, 0 to {count - 1}; raise "
            "pipeline_parallel_degree, or give one of these"
        )


@dataclass(frozen=True)
class PartitionChoice:
    partition_of: Mapping[str, int]
    """The partition of each unit, by the unit's name."""
    starts: tuple[int, ...]
    """The first call of each stage."""
    places: tuple[int, ...]
    """The partition of each stage."""
    figures: Mapping[str, tuple[float, float]]
    """Seconds and bytes of the units that were weighed, by name."""

    def __str__(self) -> str:
        lines = []
        for index in sorted(set(self.partition_of.values())):
            names = [name for name, place in self.partition_of.items() if place == index]
            lines.append(f"partition {index}: {_shortened(names)}{self._weights(names)}")
        return "\n".join(lines)

    def _weights(self, names: Sequence[str]) -> str:
        weighed = [self.figures[name] for name in names if name in self.figures]
        total = sum(seconds for seconds, _ in self.figures.values())
        if not weighed or not total:
            return ""
        share = sum(seconds for seconds, _ in weighed) / total
        return f" ({share:.0%} of the time, {format_bytes(sum(size for _, size in weighed))})"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)} modules)"


def units_by_hand(model: nn.Module, default: int) -> dict[str, nn.Module]:
    """The outermost callable modules whose parameters are all on one partition, by name."""
    units: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            places = _places_by_hand(child, default)
            below = f"{path}{name}"
            if child in seen or not places:
                continue
            if len(places) == 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                seen.add(child)
                units[below] = child
            else:
                visit(child, f"{below}.")

    visit(model, "")
    return units


def _places_by_hand(module: nn.Module, default: int) -> set[int]:
    """The partitions in whose contexts a module and those inside were created; `default` outside all contexts."""
    return {vars(inner).get(MARK, default) for inner in module.modules() if inner._parameters}


def divided_by_hand(route: Route, units: Mapping[str, nn.Module], count: int, default: int) -> PartitionChoice:
    """The division by the contexts of `partition`.

    Raises:
        StrategyError: a partition has no module that the model calls.
    """
    placed = {call.unit: _places_by_hand(units[call.unit], default).pop() for call in route.calls}
    return _division(route, placed, count, {})


def auto_units(model: nn.Module, count: int) -> dict[str, nn.Module]:
    """At least `count` units, if the model has so many modules with parameters; the largest are split first."""
    units = units_of(model)
    while len(units) < count:
        below = {name: _children(unit, name) for name, unit in units.items()}
        divisible = [name for name, inner in below.items() if len(inner) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda name: sum(parameter.numel() for parameter in units[name].parameters()))
        units = {
            path: unit
            for name, current in units.items()
            for path, unit in (below[name].items() if name == largest else [(name, current)])
        }
    return units


def _children(module: nn.Module, prefix: str) -> dict[str, nn.Module]:
    inner: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        path = f"{prefix}.{name}"
        inner.update(_children(child, path) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else {path: child})
    return inner


def divided_by_cost(
    route: Route, units: Mapping[str, nn.Module], model: nn.Module, call: StepArguments, device: DeviceSpec,
    config: Config, options: ModelOptions,
) -> PartitionChoice:  # fmt: skip
    """The division that minimizes the cost of the most expensive partition.

    Args:
        call: the arguments of the model's call in a micro-batch.

    Raises:
        StrategyError: the model has fewer groups of units than partitions.
    """
    count, weight = config.pipeline_parallel_degree, config.memory_weight
    called = [invocation.unit for invocation in route.calls]
    if config.skip_tracing:
        figures = {name: (size, size) for name, size in _weights(units, called).items()}
    else:
        figures = _figures(route, units, model, call, device, config, options)
    groups = _tied_groups(units, called)
    names = list(dict.fromkeys(groups[name] for name in called))
    if len(names) < count:
        raise StrategyError(
            f"{count} partitions need as many modules that can be apart, and {type(model).__name__} has {len(names)}: "
            f"{_shortened(names)}. Make pipeline_parallel_degree smaller"
        )
    seconds, sizes = (dict.fromkeys(names, 0.0) for _ in range(2))
    for name, (time_s, num_bytes) in figures.items():
        seconds[groups[name]] += time_s
        sizes[groups[name]] += num_bytes
    all_s, all_bytes = sum(seconds.values()) or 1.0, sum(sizes.values()) or 1.0
    costs = [weight * sizes[name] / all_bytes + (1 - weight) * seconds[name] / all_s for name in names]
    starts = least_largest(costs, count, names=names)
    place = {name: sum(start <= at for start in starts) - 1 for at, name in enumerate(names)}  # the last start ≤ at
    return _division(route, {name: place[groups[name]] for name in dict.fromkeys(called)}, count, figures)


def _tied_groups(units: Mapping[str, nn.Module], called: Sequence[str]) -> dict[str, str]:
    """The first unit of each called unit's group; units that share a parameter form a group."""
    group: dict[str, str] = {}
    holder: dict[int, str] = {}
    for name in dict.fromkeys(called):
        shared = [group[holder[id(parameter)]] for parameter in units[name].parameters() if id(parameter) in holder]
        first = min(shared, key=called.index, default=name)
        group[name] = first
        for other, leader in list(group.items()):
            if leader in shared:
                group[other] = first
        for parameter in units[name].parameters():
            holder.setdefault(id(parameter), name)
    return group


def _weights(units: Mapping[str, nn.Module], called: Iterable[str]) -> dict[str, float]:
    """Bytes of the parameters of the called units."""
    return {name: float(sum(map(tensor_bytes, units[name].parameters()))) for name in dict.fromkeys(called)}


def _figures(
    route: Route, units: Mapping[str, nn.Module], model: nn.Module, call: StepArguments, device: DeviceSpec,
    config: Config, options: ModelOptions,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Seconds and bytes of each unit, summed over its calls."""
    seconds: dict[str, float] = defaultdict(float)
    held = _weights(units, [invocation.unit for invocation in route.calls])
    kept: dict[str, float] = defaultdict(float)
    for cost in unit_costs(model, call, lambda m, batch: m(*batch[0], **batch[1]), None, device, parts=units):
        seconds[cost.name] += cost.seconds
        held[cost.name] = cost.held_bytes
        kept[cost.name] += cost.kept_bytes
    if not options.trace_memory_usage:
        kept.clear()
        for invocation in route.calls:
            kept[invocation.unit] += invocation.num_bytes
    if options.trace_execution_times and has_meta([model]):
        logger.warning("trace_execution_times: parameters are delayed, so that times are estimated, not measured")
    elif options.trace_execution_times:
        _measured(units, model, call)  # warm-up: excludes one-time work from the times
        seconds = _measured(units, model, call)
    in_flight = min(config.active_microbatches, config.microbatches)  # whose activations are alive at once
    return {name: (seconds[name], size + in_flight * kept[name]) for name, size in held.items()}


def _measured(units: Mapping[str, nn.Module], model: nn.Module, call: StepArguments) -> dict[str, float]:
    """Seconds of each unit in a forward pass."""
    seconds: dict[str, float] = defaultdict(float)
    begun: dict[str, float] = {}

    def enter(name: str, *_: Any) -> None:
        begun[name] = time.perf_counter()

    def leave(name: str, *_: Any) -> None:
        seconds[name] += time.perf_counter() - begun[name]

    with ExitStack() as contexts:
        for name, unit in units.items():
            contexts.enter_context(unit.register_forward_pre_hook(partial(enter, name)))
            contexts.enter_context(unit.register_forward_hook(partial(leave, name)))
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(preserved_state(model))
        model(*call[0], **call[1])
    return seconds


def _division(
    route: Route, placed: Mapping[str, int], count: int, figures: Mapping[str, tuple[float, float]]
) -> PartitionChoice:
    by_call = [placed[call.unit] for call in route.calls]
    missing = sorted(set(range(count)) - set(by_call))
    if missing:
        raise StrategyError(
            f"partition {missing[0]} of {count} has no module that the model calls; make some of its modules inside of "
            f"smp.partition({missing[0]}), or make pipeline_parallel_degree smaller"
        )
    starts = [at for at, place in enumerate(by_call) if at == 0 or place != by_call[at - 1]]
    return PartitionChoice(placed, tuple(starts), tuple(by_call[at] for at in starts), figures)
