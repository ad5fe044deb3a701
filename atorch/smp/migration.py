"""Translates a configuration of `smp.init` to a strategy of `auto_accelerate`, for scripts that leave `smp`."""

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

# Keys without a counterpart in any method, and the reason; reported if they are not the default.
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
    """The strategy with which `auto_accelerate` trains as `smp.init(config)` would.

    The axis `data` takes the remaining processes. One warning lists the keys without a counterpart.

    Args:
        config: as for `smp.init`.

    Raises:
        ArgumentError: the configuration is invalid.
    """
    from atorch.auto.strategy import Strategy

    source = Config.read(config)
    stages, tensor, sharded = (
        source.pipeline_parallel_degree, source.tensor_parallel_degree, source.sharded_data_parallel_degree,
    )  # fmt: skip
    axes = [axis for axis in slices(source, stages * tensor * sharded) if axis[1] > 1 or axis[0] == "data"]
    methods: list[Any] = [("parallel_mode", (axes, None))]
    if tensor > 1:
        methods.append("tensor_parallel")
    if stages > 1:
        options = {"schedule": SCHEDULES[source.pipeline], "micro_batches": source.microbatches}
        methods.append(("pipeline_parallel", options))
    elif source.microbatches > 1:
        methods.append(("micro_batch", {"count": source.microbatches}))
    if sharded > 1:
        methods.append("fsdp")
    elif source.ddp:
        methods.append("zero1" if source.shard_optimizer_state else "ddp")
    if source.fp16 or source.bf16:
        methods.append(("half", "fp16" if source.fp16 else "bf16"))
    if source.offload_activations:
        methods.append(("checkpoint", {"offload_to_cpu": True}))
    dropped = {key: why for key, why in ELSEWHERE.items() if _is_effective(source, key)}
    if dropped:
        listed = "; ".join(f"{key} ({why})" for key, why in dropped.items())
        logger.warning("strategy_of: these keys have no counterpart in a strategy: %s", listed)
    return Strategy.of(methods)


def _is_effective(config: Config, key: str) -> bool:
    if key == "sdp_gradient_clipping":
        return config.sharded_data_parallel_degree > 1 and config.sdp_gradient_clipping > 0
    if key == "prescaled_batch":
        return config.tensor_parallel_degree > 1 and not config.prescaled_batch
    if key == "activation_loading_horizon" and not config.offload_activations:
        return False
    default = Config.checked({"pipeline_parallel_degree": config.pipeline_parallel_degree, "optimize": config.optimize})
    default = Config() if key == "optimize" else default
    return bool(getattr(config, key) != getattr(default, key))
