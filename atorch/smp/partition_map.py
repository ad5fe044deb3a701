"""The partitions of a partitioned model's modules, for queries at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from atorch.errors import ArgumentError
from atorch.logs import say_once
from atorch.runtime.pipeline.stage import STAGE
from atorch.smp.session import is_initialized, session

PLACE = "_smp_place"
"""The module attribute with its `PartitionMap`, once the model is partitioned."""


class PartitionMap(NamedTuple):
    """The partition of a module; `is_here` if it runs in this stage of this process."""

    partition: int
    is_here: bool


def tell_places(part: nn.Module, partition_of: Mapping[str, int]) -> None:
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
    say_once(f"a {name} is not checkpointed: the partition has split it over {numbers}")
    return PartitionMap(-1, False)


def partition_of(module: nn.Module) -> int | None:
    """The partition of a module and its submodules; None before the model is partitioned."""
    place = place_of(module)
    return None if place is None else place.partition
