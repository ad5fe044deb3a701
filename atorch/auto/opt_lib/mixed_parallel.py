"""mixed_parallel: a recipe for the methods of tensor, pipeline and data parallelism that the mesh asks for.

`[("parallel_mode", ([("tensor", 8), ("pipeline", 2), ("data", 2)], None)), "mixed_parallel"]` expands to the method of
every axis of the mesh that is larger than 1 and has none yet. Without a mesh the planner chooses the degrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch.auto.opt_lib.context_parallel import ContextParallel
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.auto.opt_lib.tensor_parallel import TensorParallel
from atorch.auto.strategy.method import RECIPES, Method, Recipe
from atorch.errors import StrategyError, shown

_OF_AXIS: Mapping[str, type[Method]] = {
    "tensor": TensorParallel,
    "pipeline": PipelineParallel,
    "sequence": SequenceParallel,
    "context": ContextParallel,
}


class MixedParallel(Recipe):
    """The methods that split over the mesh's axes."""

    name = "mixed_parallel"

    @classmethod
    def expand(cls, config: Any, others: tuple[Method, ...]) -> tuple[Method, ...]:
        """One method for each axis above 1 that none of `others` splits over; without a mesh, tensor's and pipeline's.

        Raises:
            StrategyError: a config was given, or the mesh has nothing to split over but data.
        """
        if config:
            raise StrategyError(
                f"mixed_parallel was given {shown(config)}; it has no knobs: degrees stand in parallel_mode, and a "
                'method with knobs beside it, as ("pipeline_parallel", {"schedule": "interleaved"})'
            )
        mode = next((other for other in others if isinstance(other, ParallelMode)), None)
        if mode is None:
            axes = ["tensor", "pipeline"]
        else:
            axes = [axis for axis in _OF_AXIS if mode.size(axis) > 1]
            if not axes:
                raise StrategyError(
                    f"{mode} has no axis for mixed_parallel to split over; give one of {', '.join(_OF_AXIS)} a size "
                    "above 1, or leave parallel_mode out to have the degrees chosen"
                )
        taken = {axis for other in others for axis in other.splits}
        return tuple(_OF_AXIS[axis].of() for axis in axes if axis not in taken)


RECIPES.add(MixedParallel.name, MixedParallel)
