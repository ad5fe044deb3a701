"""Places of the modules of a partitioned model, for those that have to know while they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from atorch.errors import ArgumentError
from atorch.logs import say_once
from atorch.runtime.pipeline.stage import STAGE
from atorch.smp.session import is_initialized, session

PLACE = "_smp_place"
"""The attribute in which a module knows its place, once the model is partitioned."""


class PartitionMap(NamedTuple):
    """The partition of a module, and whether it runs here: in this stage of this process."""

    partition: int
    is_here: bool


def tell_places(part: nn.Module, partition_of: Mapping[str, int]) -> None:
    """Let the modules of a stage's model, as `cut` made it, know the partitions of their units, given by name."""
    for name, partition in partition_of.items():
        unit = part.get_submodule(name)
        stage, _ = vars(unit)[STAGE]
        is_here = any(call.unit == name for call in stage.route.calls[stage.start : stage.stop])
        for each in unit.modules():
            vars(each)[PLACE] = PartitionMap(partition, is_here)


def place_of(module: nn.Module) -> PartitionMap | None:
    """The place of a module with all that is in it; None before the model is partitioned.

    What is split over several partitions runs nowhere as a whole: it is said once, and is not `is_here`.

    Raises:
        ArgumentError: it is split, by the contexts of `smp.partition`.
    """
    places: set[PartitionMap] = {vars(each)[PLACE] for each in module.modules() if PLACE in vars(each)}
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
    """The partition on which a module lies with all that is in it; None before it is known."""
    place = place_of(module)
    return None if place is None else place.partition
