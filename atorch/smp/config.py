"""The configuration of SageMaker model parallel: the documented keys with their defaults, checked key by key.

Keys that only the original's containers, MPI or TensorFlow needed are read and reported to have no effect. Keys that
contradict each other are refused. `ModelOptions` are the arguments of `smp.DistributedModel`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from atorch.distributed import world
from atorch.errors import ArgumentError, near_miss, shown
from atorch.files.config_dict import NoEffect, Section
from atorch.files.strict_json import Format, parse, read_json
from atorch.logs import logger

if TYPE_CHECKING:
    from typing_extensions import Self


class ModelOptions(Section):
    """Options of a model's tracing, and of its gradients' averaging."""

    model_config = ConfigDict(strict=True)  # else "no" counts as False

    trace_device: Literal["cpu", "gpu"] = "gpu"
    trace_execution_times: bool = False
    overlapping_allreduce: bool = True
    backward_passes_per_step: int = Field(1, ge=1)
    average_grads_across_microbatches: bool = True
    bucket_cap_mb: float = Field(25, gt=0, description="in MiB")
    trace_memory_usage: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False

    @model_validator(mode="after")
    def _measures_what_trains(self) -> Self:
        if self.trace_device == "cpu" and self.trace_execution_times:
            raise ValueError(
                'trace_execution_times measures the device that trains: it must be False where trace_device is "cpu"'
            )
        return self


FORMAT = Format("configuration", ArgumentError)
VARIABLES = ("SMP_CONFIG", "SM_HP_MP_PARAMETERS")
"""The launcher's variables: the first holds a path or JSON, the second, the vendor's, holds JSON."""

Placement = Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]
PLACEMENTS: Mapping[str, str] = {"cluster": "DPT", "spread": "TPD"}

# The older name of a key, and the one that is kept.
SYNONYMS: Mapping[str, str] = {"partitions": "pipeline_parallel_degree", "fp16_params": "fp16"}
# Keys of version 2 of the original, which this package does not emulate.
OF_VERSION_2: Mapping[str, str] = {
    "hybrid_shard_degree": "sharded_data_parallel_degree",
    "sm_activation_offloading": "offload_activations",
}
LAUNCHERS = frozenset({"mpi", "torch_distributed", "pytorchddp"})
_MPI = "processes are started by torchrun, or by any other launcher of torch's"
_SHARDS = "parameters are sharded module by module, as FSDP2 does"


class Config(Section):
    """The configuration of `smp.init`. Sizes are numbers of processes or of micro-batches."""

    pipeline_parallel_degree: int = Field(1, ge=1, description="stages of the pipeline; also called `partitions`")
    microbatches: int = Field(1, ge=1, description="parts that a batch is split into")
    pipeline: Literal["interleaved", "simple"] = Field(
        "interleaved",
        description="the schedule: `interleaved` runs backward passes first (1F1B), `simple` last (GPipe)",
    )
    optimize: Literal["memory", "speed"] = Field("memory", description="what automatic partitioning balances first")
    placement_strategy: Placement = Field(
        "cluster",
        description="the order in which ranks are assigned: `D`, `P` and `T` in any order, the last letter varies "
        "fastest; `cluster` is `DPT`, `spread` is `TPD`",
    )
    auto_partition: bool = Field(True, description="partition by cost; if False, by `smp.partition`")
    default_partition: int = Field(0, ge=0, description="of modules outside of every `smp.partition`")
    memory_weight: float = Field(
        0.8, ge=0, le=1, description="weight of memory against time when partitioning; `0.2` with `optimize` `speed`"
    )
    ddp: bool = Field(False, description="average gradients over replicas; must be True where there are several")
    active_microbatches: int = Field(
        3, ge=1, description="micro-batches that may be in flight; `pipeline_parallel_degree + 2` where not given"
    )
    tensor_parallel_degree: int = Field(1, ge=1, description="processes that split a module's tensors; needs `ddp`")
    sharded_data_parallel_degree: int = Field(
        1, ge=1, description="replicas that share one copy of parameters, gradients and optimizer states"
    )
    sdp_gradient_clipping: float = Field(
        1.0, ge=0, description="largest norm of all gradients where that degree is above 1; 0 for no limit"
    )
    fp16: bool = Field(False, description="train in fp16 with a loss scale; also called `fp16_params`")
    bf16: bool = Field(False, description="train in bf16")
    shard_optimizer_state: bool = Field(False, description="share out optimizer states over replicas")
    prescaled_batch: bool = Field(False, description="the ranks of a tensor group are given the same batch")
    skip_tracing: bool = Field(False, description="partition by parameters alone, without a traced pass")
    offload_activations: bool = Field(False, description="checkpointed activations wait in host memory")
    activation_loading_horizon: Annotated[int, NoEffect("kept inputs come back when they are needed")] = Field(4, ge=1)
    deterministic_server: Annotated[bool, NoEffect("every run executes the same schedule")] = False
    ddp_dist_backend: Annotated[str, NoEffect("gloo on hosts and NCCL on CUDA devices")] = "auto"
    sdp_reduce_bucket_size: Annotated[int, NoEffect(_SHARDS)] = Field(500_000_000, ge=1)
    sdp_param_persistence_threshold: Annotated[int, NoEffect(_SHARDS)] = Field(1_000_000, ge=0)
    sdp_max_live_parameters: Annotated[int, NoEffect(_SHARDS)] = Field(1_000_000_000, ge=1)
    sdp_hierarchical_allgather: Annotated[bool, NoEffect("NCCL chooses the way by the machine's links")] = True
    delayed_parameter_initialization: bool = Field(
        False, description="parameters made inside `smp.model_creation` get memory and values at the first step"
    )
    static_mode: Annotated[bool, NoEffect("every schedule is static")] = False
    fast_mode: Annotated[bool, NoEffect("stages send to one another directly")] = False
    contiguous: Annotated[bool, NoEffect("it was for TensorFlow; stages here follow the order of execution")] = True
    horovod: Annotated[bool, NoEffect("`ddp` averages gradients")] = False
    processes_per_host: Annotated[int | None, NoEffect(_MPI)] = None
    custom_mpi_options: Annotated[str, NoEffect(_MPI)] = ""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, values: Any) -> Any:
        """Replace synonyms, and fill in the defaults that depend on other keys."""
        if not isinstance(values, Mapping):
            return values
        config = dict(values)
        for other, name in SYNONYMS.items():
            if other in config and config.setdefault(name, config[other]) != config[other]:
                raise ValueError(
                    f"{other} is {shown(config[other])} and {name} {shown(config[name])}; they are one key"
                )
            config.pop(other, None)
        for key in [key for key in config if key in OF_VERSION_2]:
            raise ValueError(f"{key} is a key of the original's version 2; here it is {OF_VERSION_2[key]}")
        for key in config:
            if key not in cls.model_fields:
                names = [*cls.model_fields, *SYNONYMS]
                raise ValueError(f"there is no key {shown(key)} here; {near_miss(str(key), names)}")
        config.setdefault("memory_weight", 0.2 if config.get("optimize") == "speed" else 0.8)
        degree = config.get("pipeline_parallel_degree", 1)
        if isinstance(degree, int):  # else validation of the key refuses it
            config.setdefault("active_microbatches", max(degree, 1) + 2)
        return config

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; a model trains in one of them")
        if self.default_partition >= self.pipeline_parallel_degree:
            raise ValueError(
                f"default_partition is {self.default_partition}; with pipeline_parallel_degree "
                f"{self.pipeline_parallel_degree} partitions are 0 to {self.pipeline_parallel_degree - 1}"
            )
        for name in ("tensor_parallel_degree", "sharded_data_parallel_degree"):
            if getattr(self, name) > 1 and not self.ddp:
                raise ValueError(
                    f"{name} is {getattr(self, name)} and ddp is False; its processes see different samples, so "
                    "gradients are averaged over them: give ddp True"
                )
        if self.sharded_data_parallel_degree > 1 and self.shard_optimizer_state:
            raise ValueError(
                f"sharded_data_parallel_degree is {self.sharded_data_parallel_degree}, which shards optimizer states "
                "too; leave shard_optimizer_state out"
            )
        return self

    @property
    def partitions(self) -> int:
        """The documents' older name of `pipeline_parallel_degree`."""
        return self.pipeline_parallel_degree

    @property
    def placement(self) -> str:
        """The letters D, P and T in the order in which ranks are assigned; the last varies fastest."""
        return PLACEMENTS.get(self.placement_strategy, self.placement_strategy)

    @classmethod
    def read(cls, config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Config:
        """Read a dict, a JSON file, or for None the launcher's variable; without one, the defaults.

        A dict may be the vendor's nested one, `{"smdistributed": {"modelparallel": {"parameters": {…}}}, "mpi": {…}}`.
        One warning lists the keys that have no effect.

        Raises:
            ArgumentError: the argument is none of these, a key is unknown (the error suggests the nearest) or has an
                invalid value, or two keys contradict each other.
        """
        if isinstance(config, Config):
            return config
        given: Any = config
        source = ""
        try:
            if given is None and (variable := world.variable(*VARIABLES)) is not None:
                source, text = variable
                is_path = source == VARIABLES[0] and not text.lstrip().startswith("{")
                given = text if is_path else parse(text, FORMAT)
            if isinstance(given, (str, os.PathLike)):
                given, source = read_json(given, FORMAT), os.fspath(given)
            if given is not None and not isinstance(given, Mapping):
                raise ArgumentError(f"config is {shown(given)}; it is a dict, the path of a JSON file, or None")
            parameters, unused = _flat(given or {})
            result = cls.checked(parameters)
        except ArgumentError as error:
            raise ArgumentError(f"{source}: {error}" if source else str(error)) from None
        unused.update(result.without_effect())
        if unused:
            listed = "; ".join(f"{key} ({why})" for key, why in unused.items())
            logger.warning("config: these keys have no effect here: %s", listed)
        return result


def _flat(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The parameters of a nested or flat configuration, and the other keys, which have no effect, with the reason."""
    unused = {key: _MPI for key in config if key in LAUNCHERS}
    inner: Mapping[str, Any] = {key: value for key, value in config.items() if key not in LAUNCHERS}
    place = "config"
    for key, beside in (("smdistributed", ()), ("modelparallel", ()), ("parameters", ("enabled",))):
        if key not in inner and not any(name in inner for name in beside):
            if place == "config.smdistributed":
                raise ArgumentError(
                    f"{place} has {', '.join(map(repr, inner)) or 'nothing'}; it must have modelparallel"
                )
            continue
        for name in inner:
            if name not in (key, *beside):
                raise ArgumentError(f"{place} has {shown(name)} next to {key!r}; write all keys there")
        if not inner.get("enabled", True):
            raise ArgumentError(f"{place}.enabled is {inner['enabled']!r}, and smp.init was called; give True")
        place, inner = f"{place}.{key}", inner.get(key, {})
        if not isinstance(inner, Mapping):
            raise ArgumentError(f"{place} is {shown(inner)}; it is a dict")
    return inner, unused
