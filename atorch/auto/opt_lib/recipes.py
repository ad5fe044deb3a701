"""Recipes, which expand to several methods: mixed_parallel, and ds_3d_parallel under DeepSpeed's pipeline engine.

`[("parallel_mode", ([("tensor", 8), ("pipeline", 2), ("data", 2)], None)), "mixed_parallel"]` expands to the method of
each axis.

The mesh of ds_3d_parallel is ([("tensor", …), ("data", …), ("pipeline", …)], None), in DeepSpeed's order. The engine
trains only whole batches: `result.step(batch)` replaces the loop. The original ATorch asked users to describe each
model (how its layers are split, what is tied); here the model itself shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atorch.auto.opt_lib.context_parallel import ContextParallel
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.auto.opt_lib.tensor_parallel import TensorParallel
from atorch.auto.opt_lib.zero1 import Zero1
from atorch.auto.strategy.method import RECIPES, Method, Recipe
from atorch.errors import StrategyError, near_miss, shown

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
                f"mixed_parallel was given {shown(config)}; it has no knobs: degrees belong in parallel_mode, and a "
                'method with knobs next to it, as ("pipeline_parallel", {"schedule": "interleaved"})'
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


_NEEDLESS: Mapping[str, str] = {
    "tpinfo": "tensor_parallel derives from the model how it is split; give that method a plan to have it otherwise",
    "custom_patcher": "modules are split without patches",
    "tie_first": "tied parameters are found and kept equal, wherever they are",
    "logit_helper": "the model's own forward runs, logits included",
    "batch_fn": "every process has the batch of the loader; shape it in prepare_input",
    "base_seed": "the layers are built when the model is; seed before you make it",
}
"""Arguments of the original ATorch that are not needed here, with the reason."""
_KNOWN = ("ds_config", *_NEEDLESS)


class Ds3dParallel(Recipe):
    """tensor_parallel, pipeline_parallel and zero1, the last two by DeepSpeed."""

    name = "ds_3d_parallel"

    @classmethod
    def expand(cls, config: Any, others: tuple[Method, ...]) -> tuple[Method, ...]:
        """The methods for the mesh in `others`; `config` may hold ds_config, DeepSpeed's own configuration.

        Raises:
            StrategyError: there is no mesh with a pipeline, or an argument is unknown or not needed.
        """
        config = {} if config is None else config
        if not isinstance(config, Mapping):
            raise StrategyError(f"ds_3d_parallel was given {shown(config)}; it takes a dict of ds_config or nothing")
        for name in config:
            if name in _NEEDLESS:
                raise StrategyError(f"ds_3d_parallel needs no {name}: {_NEEDLESS[name]}. Leave it out", (name,))
            if name not in _KNOWN:
                raise StrategyError(f"ds_3d_parallel has no argument {shown(name)}; {near_miss(str(name), _KNOWN)}")
        mode = next((other for other in others if isinstance(other, ParallelMode)), None)
        if mode is None or mode.size("pipeline") == 1:
            raise StrategyError(
                "ds_3d_parallel runs a pipeline; give it a mesh with one, as "
                '("parallel_mode", ([("tensor", 2), ("data", 2), ("pipeline", 2)], None))'
            )
        methods: list[Method] = [PipelineParallel.of({"backend": "deepspeed", **config}), Zero1(backend="deepspeed")]
        if mode.size("tensor") > 1:
            methods.append(TensorParallel())
        taken = {type(other) for other in others}
        return tuple(method for method in methods if type(method) not in taken)


RECIPES.add(Ds3dParallel.name, Ds3dParallel)
