"""Activation checkpointing by module, and by runs of a Sequential's layers on one partition.

`runtime.memory.recompute` does the work. This module decides which layers are recomputed together: only those that this
process runs, and never across the border of two partitions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from atorch.errors import ArgumentError, check_bools, near_miss, shown
from atorch.logs import log_once
from atorch.model.wrapper import lift_forward, override_forward
from atorch.runtime.memory.recompute import chained, disable_checkpointing, recomputed
from atorch.runtime.pipeline.stage import STAGE
from atorch.smp.session import is_initialized, session

OPTIONS = "_smp_checkpointing"
"""The attribute with the `CheckpointOptions` of a module whose forward is checkpointed."""
PLACE = "_smp_place"
"""The module attribute with its `PartitionMap`, once the model is partitioned."""


class PartitionMap(NamedTuple):
    """The partition of a module; `is_here` if it runs in this stage of this process."""

    partition: int
    is_here: bool


def record_places(part: nn.Module, partition_of: Mapping[str, int]) -> None:
    """Record in the modules of a stage's model, made by `cut`, the partitions of their units, given by name."""
    for name, partition in partition_of.items():
        unit = part.get_submodule(name)
        stage, _ = vars(unit)[STAGE]
        is_here = any(call.unit == name for call in stage.route.calls[stage.start : stage.stop])
        for module in unit.modules():
            vars(module)[PLACE] = PartitionMap(partition, is_here)


def place_of(module: nn.Module) -> PartitionMap | None:
    """The place of a module and its submodules; None before the model is partitioned.

    A module that is split over several partitions is nowhere `is_here`, which is logged once.

    Raises:
        ArgumentError: the contexts of `smp.partition` split it.
    """
    places: set[PartitionMap] = {vars(inner)[PLACE] for inner in module.modules() if PLACE in vars(inner)}
    if not places:
        return PartitionMap(0, True) if not is_initialized() or session().config.partitions == 1 else None
    if len(places) == 1:
        return places.pop()
    name, numbers = type(module).__name__, ", ".join(map(str, sorted({place.partition for place in places})))
    if not session().config.auto_partition:
        raise ArgumentError(
            f"a {name} is to be checkpointed, and its modules are on partitions {numbers}; checkpoint modules that "
            "lie on one each, or put all of it into one smp.partition"
        )
    log_once(f"a {name} is not checkpointed: the partition has split it over {numbers}")
    return PartitionMap(-1, False)


class CheckpointOptions(NamedTuple):
    """Options of a module's checkpointing.

    size: number of a Sequential's layers that are recomputed together; None for all on one partition.
    """

    preserve_rng_state: bool
    size: int | None = 1


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Checkpoint all further calls of a module: keep only its inputs, and recompute the rest in backward.

    State dict keys do not change, and BatchNorm counts once. A second call replaces the settings of the first one.
    A module that automatic partitioning splits over processes runs without checkpointing.

    Args:
        preserve_rng_state: reproduce random numbers, such as dropout's, in the recompute; False saves storing the
            generators' states.
        pack_args_as_tuple: for a Sequential; accepted without effect. Layers may always take and return tuples.
        strategy: for a Sequential, the layers that are recomputed together: `each` layer alone, the `contiguous` layers
            on one partition, or `group_N`, up to N of these. Before partitioning it is each layer.

    Raises:
        ArgumentError: not a module with a forward, an unknown strategy, or a strategy without a Sequential.
    """
    check_module("set_activation_checkpointing", module)
    check_bools(
        "set_activation_checkpointing", preserve_rng_state=preserve_rng_state, pack_args_as_tuple=pack_args_as_tuple
    )
    if not is_sequential(module) and (strategy != "each" or pack_args_as_tuple):
        what = f"strategy {shown(strategy)}" if strategy != "each" else "pack_args_as_tuple=True"
        raise ArgumentError(
            f"set_activation_checkpointing was given {what} for a {type(module).__name__}; these are of an "
            "nn.Sequential, whose layers can be taken together. Leave it out, or give the Sequential"
        )
    size = size_of(strategy) if is_sequential(module) else None
    checkpoint_forward(module)
    vars(module)[OPTIONS] = CheckpointOptions(preserve_rng_state, size)


def checkpoint_forward(module: nn.Module) -> None:
    """Make `module.forward` checkpoint itself by the module's `OPTIONS`, if it has them."""
    if not hasattr(type(module).forward, OPTIONS) and not hasattr(type(module).__call__, OPTIONS):
        override_forward(module, _checkpointing)


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Disable checkpointing of the model inside; afterwards restore it, around overrides that were added inside."""
    for module in model.modules():
        lift_forward(module, _checkpointing)
    try:
        with disable_checkpointing():
            yield
    finally:
        for module in model.modules():
            if OPTIONS in vars(module):
                checkpoint_forward(module)


def _checkpointing(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        options: CheckpointOptions | None = vars(self).get(OPTIONS)
        if options is None:
            return original(self, *args, **kwargs)
        if is_sequential(self):
            return in_runs(list(self.children()), options, *args, **kwargs)
        return run_module(self, partial(original, self), options, args, kwargs)

    setattr(run, OPTIONS, True)
    return run


def run_module(
    module: nn.Module,
    forward: Callable[..., Any],
    options: CheckpointOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`forward(*args, **kwargs)`, checkpointed if the whole module runs on this process."""
    place = place_of(module)
    if place is not None and not place.is_here:
        return forward(*args, **kwargs)
    return _recomputed(forward, [module], options, args, kwargs)


def in_runs(layers: list[nn.Module], options: CheckpointOptions, input: Any) -> Any:
    """Run the layers in sequence, checkpointed in runs of up to `options.size` layers on one partition."""
    for place, run in _runs(layers, options.size):
        chain = partial(chained, run)
        if place is not None and not place.is_here:
            input = chain(input)
        else:
            input = _recomputed(chain, run, options, (input,), {})
    return input


def _runs(layers: list[nn.Module], size: int | None) -> Iterator[tuple[PartitionMap | None, list[nn.Module]]]:
    for place, same in groupby(layers, place_of):
        run = list(same)
        step = 1 if place is None else size or len(run)
        for start in range(0, len(run), step):
            yield place, run[start : start + step]


def _recomputed(
    function: Callable[..., Any],
    owners: list[nn.Module],
    options: CheckpointOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    offloads = is_initialized() and session().config.offload_activations
    return recomputed(
        function, owners, args, kwargs, preserve_rng_state=options.preserve_rng_state, offload_to_cpu=offloads
    )


def is_sequential(module: nn.Module) -> bool:
    """True if the module is a Sequential with torch's own forward."""
    forward = "forward" not in vars(module) and inspect.unwrap(type(module).forward)
    return isinstance(module, nn.Sequential) and forward is nn.Sequential.forward


def size_of(strategy: str) -> int | None:
    """The number of layers that a strategy recomputes together; None for all of a partition.

    Raises:
        ArgumentError: there is no such strategy.
    """
    if strategy == "contiguous":
        return None
    match = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if match is not None:
        return int(match[1])
    if strategy == "each":
        return 1
    examples = ("each", "contiguous", "group_2")
    hint = near_miss(strategy, examples) if isinstance(strategy, str) else ""
    raise ArgumentError(
        f"there is no strategy {shown(strategy)}; strategies are 'each', 'contiguous', and 'group_N' with a number of "
        f"layers, such as 'group_2' {hint}".rstrip()
    )


def check_module(caller: str, module: object) -> None:
    """Raise ArgumentError unless `module` is a module with a forward; `caller` is the caller's name."""
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"{caller} was given {shown(module)}; give a module, not a function or a class")
    if "forward" not in vars(module) and inspect.unwrap(type(module).forward) is nn.Module.forward:
        raise ArgumentError(
            f"{caller} was given a {type(module).__name__}, which has no forward that could run again; call it for "
            "each of the modules inside"
        )
