"""Flags of torchtitan for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError
from atorch.trainer_configs.keys import Keys, torchrun_script
from atorch.trainer_configs.setup import TrainingSetup, lacking_methods

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

NAME = "torchtitan.sh"
TOKENS, CONTEXT = "training.num_tokens_per_microbatch_per_dp_rank", "training.max_context_length"
ABSENT: Mapping[str, str] = {
    "amp_native": "torchtitan casts what FSDP gathers: use half",
    "chunk": "torchtitan has no budget of device memory",
    "fp8": "torchtitan's float8 is chosen in a configuration function, not by a flag",
    "module_replace": "torchtitan has its own modules",
    "zero1": "torchtitan shards by FSDP: use zero2 or fsdp",
}
KNOBS: Mapping[str, tuple[str, ...]] = {
    **{"half": ("dtype",), "parallel_mode": ("slices",), "micro_batch": ("size", "count", "reduce")},
    **{"offload": ("optimizer", "parameters"), "sequence_parallel": ("mode",), "checkpoint": ("selective",)},
    **{"context_parallel": ("load_balance",), "pipeline_parallel": ("schedule", "micro_batches")},
    **{"cross_entropy": ("chunk_tokens",), "expert_parallel": ("size",), "fsdp": (), "zero2": (), "compile": ()},
}


def lacking(strategy: Strategy) -> Iterator[str]:
    methods: dict[str, Any] = {method.name: method for method in strategy}
    yield from lacking_methods(strategy, ABSENT, KNOBS)
    if "half" in methods and methods["half"].dtype != "bf16":
        yield "half(fp16): torchtitan computes in bf16 or fp32"
    if getattr(methods.get("sequence_parallel"), "mode", "megatron") != "megatron":
        yield "sequence_parallel (ulysses): torchtitan splits sequences by context_parallel"
    stages = methods.get("pipeline_parallel")
    if stages is not None and stages.schedule == "zero_bubble":
        yield "pipeline_parallel (zero_bubble): torchtitan's has two pieces of the model on a process"
    offload = methods.get("offload")
    if offload is not None and (offload.parameters, offload.optimizer) != (1.0, 1.0):
        yield f"{offload}: torchtitan offloads parameters, gradients and states together"
    sharding = next((name for name in ("zero2", "fsdp") if name in methods), None)
    if sharding and stages is None and getattr(methods.get("micro_batch"), "reduce", None) == "once":
        yield f"{sharding} with micro_batch: torchtitan reduces gradients with each micro-batch"
    if "context_parallel" in methods and sharding is None:
        yield "context_parallel without fsdp or zero2: torchtitan shards over context as well"


def write(setup: TrainingSetup) -> dict[str, str]:
    module, config = _config_of(setup, Keys.of("torchtitan"))
    words = ("-m", "torchtitan.train", "--module", module, "--config", config, '"$@"', *flags(setup))
    return {NAME: torchrun_script(setup, NAME, words)}


def _config_of(setup: TrainingSetup, keys: Keys) -> tuple[str, str]:
    """The module and the configuration of the model; for others, variables that have them."""
    for name, facts in keys.facts["configs"].items():
        if setup.model is not None and setup.model.lower() == facts["model"].lower() and not facts.get("fp8"):
            return facts["module"], name
    return "${MODULE:?the module of your model}", "${CONFIG:?its configuration}"


def flags(setup: TrainingSetup) -> list[str]:
    """The flags of a setup that `lacks` nothing.

    Raises:
        ArgumentError: the length of a sample is not known, or torchtitan lacks the optimizer or adapters.
    """
    if setup.seq is None:
        raise ArgumentError("torchtitan's batches are in tokens, and the length of a sample is not known; give --seq")
    knobs = setup.knobs
    if knobs.get("lora") or knobs.get("qlora") or knobs.get("optimizer") not in (None, "adamw", "adamw_bf16"):
        raise ArgumentError("torchtitan's flags have AdamW and all of a model trained; leave lora and optimizer out")
    world = setup.world_size or 1
    strategy, shares = setup.strategy(world), setup.shares(world)
    micro, count, total = setup.batches(world)
    methods: dict[str, Any] = {method.name: method for method in strategy}
    sharding = next((name for name in ("zero2", "fsdp") if name in methods), None)
    zero = setup.axes.get("zero", 1)
    shards = 1 if sharding is None else zero if zero > 1 else shares
    stages = methods.get("pipeline_parallel")
    values: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": shares // shards,
        "parallelism.data_parallel_shard_degree": shards,
        **{
            f"parallelism.{axis}_parallel_degree": setup.axes.get(axis, 1) for axis in ("tensor", "context", "pipeline")
        },
        TOKENS: (micro or 1) * setup.seq,
        "training.num_tokens_per_train_step": (total or 1) * setup.seq,
        CONTEXT: setup.seq,
        "parallelism.fsdp_reshard_after_forward": "never" if sharding == "zero2" else "always",
        "training.dtype": "bfloat16" if knobs.get("dtype") == "bf16" else "float32",
        "training.mixed_precision_param": "bfloat16" if "half" in methods else "float32",
    }
    if stages is not None:
        names = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
        values |= {"parallelism.pipeline_parallel_schedule": names[stages.schedule]}
        values |= {"parallelism.num_pp_microbatches": count, "training.disable_cuda_graphs": None}
    if "expert_parallel" in methods:
        values["parallelism.expert_parallel_degree"] = methods["expert_parallel"].size
    ring = methods.get("context_parallel")
    if ring is not None and not ring.load_balance:
        values["parallelism.context_parallel_load_balancer"] = "None"
    if setup.axes.get("tensor", 1) > 1 and "sequence_parallel" not in methods:
        values["parallelism.no-enable-sequence-parallel"] = None
    values |= {"compile.enable": None} if "compile" in methods else {"compile.no-enable": None}
    loss = methods.get("cross_entropy")
    chunks = 16 if loss is not None and loss.chunk_tokens is None else 1
    if loss is not None and loss.chunk_tokens is not None:
        chunks = max(2, (micro or 1) * setup.seq // loss.chunk_tokens)
    values["loss.num_chunks"] = chunks
    values |= {"training.enable_cpu_offload": None} if "offload" in methods else {}
    if knobs.get("optimizer") == "adamw_bf16":
        values["optimizer.implementation"] = "fused_opt_states_bf16"
    words = [word for key, value in values.items() for word in (f"--{key}", *([] if value is None else [str(value)]))]
    recompute = methods.get("checkpoint")
    mode = "none" if recompute is None else "selective" if recompute.selective else "full"
    return [*words, f"activation-checkpoint:{mode}"]
