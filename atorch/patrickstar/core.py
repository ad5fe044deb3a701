"""The client and its configuration: the device of a process, its memory budgets there and on the host, its group.

`initialize_engine` creates a client from the configuration. Create one directly for a model that cannot be created in a
`model_func`: `PatrickStarEngine(model, PatrickStarClient(local_rank), config)`.

The configuration is that of PatrickStar's guide: a dict in DeepSpeed's format, checked key by key. Defaults are the
guide's, or if it has none those of PatrickStar 0.4.6. A key that only PatrickStar needed is read, checked, and reported
to have no effect if given: nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, model_validator

from atorch.distributed.world import init, local_world_size
from atorch.errors import ArgumentError
from atorch.files.config_dict import NoEffect, Section
from atorch.logs import logger


class PatrickStarClient:
    """The device, budgets and process group of an engine.

    Args:
        local_rank: this process's rank on its machine, and the index of its CUDA device; without CUDA it is the CPU.
        default_chunk_size: elements of a chunk; None to search for a good size.
        config: the section `client` of the configuration.

    Raises:
        ArgumentError: there is no such device, or the configuration is invalid.
    """

    def __init__(
        self,
        local_rank: int = 0,
        default_chunk_size: int | None = None,
        config: Mapping[str, Any] | ClientSection | None = None,
    ) -> None:
        self.config = ClientSection.of(config)
        self.local_rank, self.chunk_size = local_rank, default_chunk_size
        init()
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.group.WORLD
        self.device = self._device()

    @property
    def budget_bytes(self) -> int:
        """Bytes that this process may hold on the device."""
        tracer = self.config.mem_tracer
        sharing = local_world_size() if tracer.use_fake_dist or self.device.type == "cpu" else 1
        if tracer.gpu_memory_bytes is not None:
            whole, sharing = tracer.gpu_memory_bytes, local_world_size() if tracer.use_fake_dist else 1
        elif self.device.type == "cuda":
            whole = torch.cuda.get_device_properties(self.device).total_memory
        else:
            whole = _host_bytes()
        return int(whole * tracer.overall_gpu_mem_ratio) // sharing

    @property
    def host_budget_bytes(self) -> int:
        """Bytes that this process may fill with chunks on the host."""
        return int(_host_bytes() * self.config.mem_tracer.overall_cpu_mem_ratio) // local_world_size()

    def _device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        index, count = 0 if self.config.mem_tracer.use_fake_dist else self.local_rank, torch.cuda.device_count()
        if not 0 <= index < count:
            raise ArgumentError(
                f"local_rank is {index}, and this machine has {count} CUDA devices; start as many processes, or set "
                "client.mem_tracer.use_fake_dist to let them share the first one"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)


@contextmanager
def torch_scope(do_allreduce: bool = True) -> Iterator[None]:
    """Accepted for PatrickStar scripts: parameters created inside are managed in chunks as all others.

    Raises:
        ArgumentError: `do_allreduce` is False, for parameters that differ between processes.
    """
    if not do_allreduce:
        raise ArgumentError(
            "torch_scope was given do_allreduce=False, for parameters that each process trains alone; processes of an "
            "engine hold one model: leave it out"
        )
    yield


def _host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


MemoryFraction = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamParams(Section):
    """`optimizer.params`."""

    lr: float = Field(0.01, ge=0, description="learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay of the two moments")
    eps: float = Field(1e-8, ge=0, description="added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="added to the gradient by Adam, taken from the weight by AdamW")
    use_hybrid_adam: bool = Field(
        True,
        description="chunks for which the device has room stay there with their moments and are stepped there, or this "
        "process's share of them; if False, all are stepped on the host",
    )


class OptimizerSection(Section):
    type: Literal["Adam", "AdamW"] = Field("Adam", description="`Adam` or `AdamW`")
    params: AdamParams = Field(default_factory=AdamParams, description="what the optimizer is made with")


class Fp16Section(Section):
    """`fp16`: the loss scale. Computation is in fp16 with or without this section."""

    enabled: Literal[True] = Field(description="must be given, and be True")
    loss_scale: float = Field(
        0.0, ge=0, description="0 for a dynamic scale, else the scale; a static scale never checks overflow"
    )
    initial_scale_power: int = Field(16, ge=0, le=127, description="a dynamic scale begins at 2 to the power of it")
    loss_scale_window: int = Field(1000, ge=1, description="good steps in a row after which it doubles")
    hysteresis: int = Field(2, ge=1, description="overflows before it halves; counted anew once it has doubled")
    min_loss_scale: float = Field(1.0, gt=0, description="it never falls below")


class MemTracerSection(Section):
    """`client.mem_tracer`: the memory budgets."""

    use_async_mem_monitor: Annotated[
        bool, NoEffect("what operations need is counted on fake tensors before the first step, not sampled by a thread")
    ] = True
    warmup_gpu_chunk_mem_ratio: Annotated[
        MemoryFraction, NoEffect("there is no warm-up step: the trace has the order of accesses before the first one")
    ] = 0.1
    overall_gpu_mem_ratio: MemoryFraction = Field(
        0.8, description="the share of the device's memory that is the budget"
    )
    gpu_memory_bytes: int | None = Field(
        None, ge=1, description="not in PatrickStar: what the device is taken to have; what it has, if not given"
    )
    overall_cpu_mem_ratio: MemoryFraction = Field(
        0.8, description="the share of the host's memory that the processes of a machine may fill with chunks"
    )
    margin_use_ratio: Annotated[
        MemoryFraction, NoEffect("chunks stay on the device where the schedule has room for them at every moment")
    ] = 0.8
    use_fake_dist: bool = Field(False, description="the processes of a machine share one device, and its budget")
    with_static_partition: Annotated[
        bool, NoEffect("chunks get what activations leave at each moment; there is no share of a warm-up to keep")
    ] = False


class OptsSection(Section):
    """`client.opts`: options of chunk moves."""

    with_mem_saving_comm: Annotated[bool, NoEffect("each chunk is sharded over all processes and gathered alone")] = (
        False
    )
    with_mem_cache: Annotated[bool, NoEffect("torch's allocator keeps what was freed for the next chunk")] = False
    with_async_move: bool = Field(
        True, description="fetch chunks ahead, while others compute; False in PatrickStar, whose copies could be late"
    )


class ClientSection(Section):
    mem_tracer: MemTracerSection = Field(default_factory=MemTracerSection, description="how much memory is whose")
    opts: OptsSection = Field(default_factory=OptsSection, description="how chunks move")


# Sections of DeepSpeed's format, common in copied configurations, that this engine ignores.
UNUSED: Set[str] = frozenset(
    {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
        "wall_clock_breakdown", "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "prescale_gradients", "communication_data_type", "gradient_predivide_factor", "sparse_gradients", "dump_state",
        "memory_breakdown", "activation_checkpointing", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
        "comms_logger", "aio", "elasticity", "autotuning", "dataloader_drop_last", "data_efficiency",
        "disable_allgather", "seq_parallel_communication_data_type", "checkpoint", "amp", "bf16", "bfloat16",
        "compression_training", "curriculum_learning", "progressive_layer_drop", "sparse_attention", "eigenvalue",
        "quantize_training", "hybrid_engine", "nebula", "comet", "data_types", "timers", "compile", "scheduler",
        "fp32_allreduce", "load_universal_checkpoint", "vocabulary_size",
    }
)  # fmt: skip
PRECISIONS: Set[str] = frozenset({"amp", "bf16", "bfloat16"})  # ignored if disabled, refused if enabled


class EngineConfig(Section):
    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        unused = {key for key in values if key in UNUSED and not (key in PRECISIONS and _is_on(values[key]))}
        for key in sorted(unused):
            if key == "scheduler":
                logger.warning(
                    "config: scheduler is DeepSpeed's and has no effect here; make a scheduler of torch.optim with the "
                    "optimizer that initialize_engine returns"
                )
            else:
                logger.info("config: %s is DeepSpeed's and has no effect here", key)
        return {key: value for key, value in values.items() if key not in unused}

    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="what steps")
    fp16: Fp16Section | None = Field(None, description="the loss scale; without this section there is none")
    gradient_clipping: float = Field(
        -1.0,
        description="the largest global norm of the gradients, as in DeepSpeed's format, below 0 for no limit; "
        "PatrickStar limited each value instead",
    )
    default_chunk_size: int = Field(
        64 * 1024 * 1024, ge=1, description="elements of a chunk; where it is not given, a better one is searched for"
    )
    release_after_init: Annotated[
        bool, NoEffect("a process has the whole model on the host until its first batch, which suits `from_pretrained`")
    ] = False
    use_cpu_embedding: bool = Field(
        True, description="embeddings whose table nothing else uses stay on the host in fp32 and are looked up there"
    )
    client: ClientSection = Field(default_factory=ClientSection, description="memory, and how chunks move")

    @property
    def chunk_size(self) -> int | None:
        """Elements of a chunk if the user set them; None to search for a good size."""
        return self.default_chunk_size if "default_chunk_size" in self.model_fields_set else None


def _is_on(section: Any) -> bool:
    return bool(section.get("enabled")) if isinstance(section, Mapping) else bool(section)
