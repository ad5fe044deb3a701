"""A configuration of `smp.init` as a strategy of `auto_accelerate`: the way out of this room, into the whole house."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atorch.logs import logger
from atorch.smp.config import Config
from atorch.smp.session import slices

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

SCHEDULES: Mapping[str, str] = {"interleaved": "1f1b", "simple": "gpipe"}
_CUT = "a stage is as fast as the others by traced cost, in memory as the planner sees it"

# What a key says that no method has a word for, where it is not the default.
ELSEWHERE: Mapping[str, str] = {
    "optimize": _CUT,
    "memory_weight": _CUT,
    "skip_tracing": _CUT,
    "auto_partition": "smp.partition is not read; pipeline_parallel's split_points name the first module of each stage",
    "default_partition": "smp.partition is not read, as above",
    "active_microbatches": "1f1b has as many in flight as stages are left, gpipe all",
    "activation_loading_horizon": "what checkpoint keeps on the host comes back when it is needed",
    "sdp_gradient_clipping": "call atorch.clip_grad_norm(model, norm) between backward and optim.step()",
    "delayed_parameter_initialization": "make the model under torch.device('meta'), and auto_accelerate fills it",
    "prescaled_batch": "processes along tensor are given one batch; give them the rows that they had together",
}


def strategy_of(config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Strategy:
    """The strategy by which `auto_accelerate` trains as `smp.init(config)` would.

    The axis `data` takes the processes that are left. What has no counterpart is named in one warning.

    Args:
        config: what `smp.init` takes.

    Raises:
        ArgumentError: the configuration does not hold.
    """
    from atorch.auto.strategy import Strategy

    found = Config.read(config)
    stages, tensor, sharded = (
        found.pipeline_parallel_degree, found.tensor_parallel_degree, found.sharded_data_parallel_degree,
    )  # fmt: skip
    axes = [axis for axis in slices(found, stages * tensor * sharded) if axis[1] > 1 or axis[0] == "data"]
    methods: list[Any] = [("parallel_mode", (axes, None))]
    if tensor > 1:
        methods.append("tensor_parallel")
    if stages > 1:
        given = {"schedule": SCHEDULES[found.pipeline], "micro_batches": found.microbatches}
        methods.append(("pipeline_parallel", given))
    elif found.microbatches > 1:
        methods.append(("micro_batch", {"count": found.microbatches}))
    if sharded > 1:
        methods.append("fsdp")
    elif found.ddp:
        methods.append("zero1" if found.shard_optimizer_state else "ddp")
    if found.fp16 or found.bf16:
        methods.append(("half", "fp16" if found.fp16 else "bf16"))
    if found.offload_activations:
        methods.append(("checkpoint", {"offload_to_cpu": True}))
    told = {key: why for key, why in ELSEWHERE.items() if _says_something(found, key)}
    if told:
        words = "; ".join(f"{key} ({why})" for key, why in told.items())
        logger.warning("strategy_of: these keys have no counterpart in a strategy: %s", words)
    return Strategy.of(methods)


def _says_something(config: Config, key: str) -> bool:
    if key == "sdp_gradient_clipping":
        return config.sharded_data_parallel_degree > 1 and config.sdp_gradient_clipping > 0
    if key == "prescaled_batch":
        return config.tensor_parallel_degree > 1 and not config.prescaled_batch
    if key == "activation_loading_horizon" and not config.offload_activations:
        return False
    default = Config.checked({"pipeline_parallel_degree": config.pipeline_parallel_degree, "optimize": config.optimize})
    default = Config() if key == "optimize" else default
    return bool(getattr(config, key) != getattr(default, key))
