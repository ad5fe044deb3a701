"""Flags of Megatron-LM for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError
from atorch.trainer_configs.keys import torchrun_script
from atorch.trainer_configs.setup import TrainingSetup, Traits, lacking_methods

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

NAME = "megatron.sh"
SHARDING: Mapping[str, str] = {
    **{"no_shard": "ddp", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "fsdp"},
    **{"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"},
}
SIZES: Mapping[str, tuple[str, str]] = {
    "--num-layers": ("layers", "blocks"),
    "--hidden-size": ("hidden", "hidden size"),
    "--num-attention-heads": ("heads", "attention heads"),
    "--kv-channels": ("head-dim", "features of a head"),
    "--num-experts": ("experts", "experts of a block"),
    "--moe-router-topk": ("top-k", "experts of a token"),
}
OPTIMIZERS: Mapping[str, str] = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
TRAITS = Traits(
    # Fused norms and activations, and probabilities of the loss in fp32, of which the gradient is made in place
    # (megatron/core/fusions, core/tensor_parallel/cross_entropy.py): the activations of arXiv 2205.05198, section 4.
    kernels={"fused_norm": True, "fused_activation": True, "loss_bytes": 2.0},
    # 2 bytes a weight and 4 a gradient, in contiguous buffers, beside 12 of optimizer states, whose step makes no
    # temporaries: 18, or 6 + 12 / d (`num_bytes_per_parameter` of megatron/training/theoretical_memory_usage.py).
    cost={
        **{"main_grad_itemsize": 4.0, "grads_persist": True, "step_itemsize": 0.0, "adds_in_products": True},
        **{"placeholder_itemsize": 2.0, "frees_boundaries": True, "scatters_sends": True, "tensor_beside": "weights"},
        **{"fp8_once": True, "fp8_gathers": True},
    },
)
ABSENT: Mapping[str, str] = {
    "amp_native": "Megatron casts the whole model: use half",
    "chunk": "Megatron has no budget of device memory",
    "compile": "Megatron compiles single functions alone",
    "cross_entropy": "Megatron holds all logits",
    "module_replace": "Megatron has its own modules",
}
KNOBS: Mapping[str, tuple[str, ...]] = {
    **{"half": ("dtype",), "parallel_mode": ("slices",), "micro_batch": ("size", "count", "reduce")},
    **{"offload": ("optimizer",), "sequence_parallel": ("mode",), "checkpoint": (), "fsdp": (), "zero2": ()},
    "expert_parallel": ("size", "dispatcher"),
    **{"pipeline_parallel": ("schedule", "interleave", "micro_batches"), "fp8": ("exclude", "include", "fp8_format")},
}


def lacking(strategy: Strategy) -> Iterator[str]:
    methods = {method.name: method for method in strategy}
    yield from lacking_methods(strategy, ABSENT, KNOBS)
    sizes = {axis: size for method in strategy for axis, size in getattr(method, "slices", ())}
    if sizes.get("zero", 1) > 1:
        yield "shards with copies between them (the axis zero): a file of Megatron's shards over all processes"
    if sizes.get("sequence", 1) > 1 and sizes.get("context", 1) > 1:
        yield "sequence_parallel with context_parallel: Megatron splits attention in one way"
    sharding = next((name for name in ("zero2", "fsdp") if name in methods), None)
    if sharding and getattr(methods.get("micro_batch"), "reduce", None) == "once":
        yield f"{sharding} with micro_batch: Megatron-FSDP reduces gradients with each micro-batch"
    if sharding and "offload" in methods:
        yield f"{sharding} with offload: Megatron offloads the states of its own optimizer alone"
    if getattr(methods.get("pipeline_parallel"), "schedule", "1f1b") not in ("1f1b", "interleaved"):
        yield "pipeline_parallel: Megatron has the schedules 1f1b and interleaved"


def write(setup: TrainingSetup) -> dict[str, str]:
    words = ["pretrain_gpt.py", *flags(setup)]
    is_sharded = "--use-megatron-fsdp" in words
    before = "unset CUDA_DEVICE_MAX_CONNECTIONS" if is_sharded else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    return {NAME: torchrun_script(setup, NAME, [*words, '"$@"'], (before,))}


def flags(setup: TrainingSetup) -> list[str]:
    """The flags of a setup that `lacks` nothing."""
    strategy = setup.strategy(setup.world_size or 1)
    micro, _, total = setup.batches(setup.world_size or 1)
    methods: dict[str, Any] = {method.name: method for method in strategy}
    found = [*_shape_flags(setup), "--micro-batch-size", str(micro), "--global-batch-size", str(total)]
    if setup.seq is not None:
        found += ["--seq-length", str(setup.seq), "--max-position-embeddings", str(setup.seq)]
    for axis, flag in (("tensor", "--tensor-model-parallel-size"), ("pipeline", "--pipeline-model-parallel-size")):
        found += [flag, str(setup.axes.get(axis, 1))]
    found += ["--context-parallel-size", str(setup.axes.get("context", setup.axes.get("sequence", 1)))]
    if setup.axes.get("sequence", 1) > 1:
        found += ["--cp-comm-type", "a2a"]
    if getattr(methods.get("sequence_parallel"), "mode", "") == "megatron":
        found.append("--sequence-parallel")
    found += _expert_flags(methods.get("expert_parallel"))
    stages = methods.get("pipeline_parallel")
    if stages is not None and stages.schedule == "interleaved":
        found += ["--num-virtual-stages-per-pipeline-rank", str(stages.pieces)]
    sharding = {"zero2": "optim_grads", "fsdp": "optim_grads_params"}
    for name in sharding.keys() & methods.keys():
        found += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", sharding[name]]
        found += ["--ckpt-format", "fsdp_dtensor", "--no-gradient-accumulation-fusion"]
    if not methods.keys().isdisjoint(("zero1", *sharding)):
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if "half" in methods:
        found.append(f"--{methods['half'].dtype}")
    if "fp8" in methods:
        found += ["--fp8-format", methods["fp8"].fp8_format.lower(), "--fp8-recipe", "delayed"]
    if "checkpoint" in methods:
        found += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    if "offload" in methods:
        found += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", str(float(methods["offload"].optimizer))]
    return found + _optimizer_flags(setup)


def _expert_flags(experts: Any) -> list[str]:
    if experts is None:
        return []
    once = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"]
    found = ["--expert-model-parallel-size", str(experts.size), "--expert-tensor-parallel-size", "1"]
    return [*found, *(once if experts.dispatcher == "deepep" else [])]


def _optimizer_flags(setup: TrainingSetup) -> list[str]:
    name = setup.knobs.get("optimizer") or "adamw"
    if setup.knobs.get("lora") or setup.knobs.get("qlora") or setup.knobs.get("dtype") not in (None, "fp32"):
        raise ArgumentError("Megatron-LM trains all of a model with fp32 copies; leave lora, qlora and dtype out")
    moments = {"adamw_bf16": "bf16", "adamw8bit": "fp8"}.get(name)
    known = next((flag for flag, meant in OPTIMIZERS.items() if meant == name), "adam" if moments else None)
    if known is None:
        raise ArgumentError(
            f"Megatron-LM has no optimizer {name}; it has {', '.join(dict.fromkeys(OPTIMIZERS.values()))}"
        )
    aware = ["--use-precision-aware-optimizer", "--exp-avg-dtype", str(moments), "--exp-avg-sq-dtype", str(moments)]
    backend = "unfused" if setup.knobs.get("attention") == "eager" else "auto"
    return ["--optimizer", known, *(aware if moments else []), "--attention-backend", backend]


def _shape_flags(setup: TrainingSetup) -> list[str]:
    """The model's flags, from its shape or the catalogue; for others a variable that has them."""
    from atorch.auto.sources import shapes

    shape: dict[str, Any] = dict(setup.shape)
    facts = shapes.known(setup.model) if setup.model is not None and not shape else None
    if facts is not None and "latent" not in facts and facts.get("gated", True):
        experts = facts.get("experts") or {}
        shape = {name.replace("_", "-"): value for name, value in facts.items() if isinstance(value, int)}
        shape |= {"experts": experts["count"], "top-k": experts["top_k"], "ffn": experts["ffn"]} if experts else {}
    if not shape:
        return ["${MODEL_ARGS:?the flags of your model}"]
    names = {name: flag for flag, (name, _) in SIZES.items()} | {"ffn": "--ffn-hidden-size", "vocab": "--vocab-size"}
    found = ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"]
    found += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    found += ["--disable-bias-linear", "--group-query-attention", "--num-query-groups"]
    found.append(str(shape.get("kv-heads") or shape["heads"]))
    for name, flag in names.items():
        if shape.get(name):
            found += [flag, str(shape[name])]
    return found if shape.get("tied") else [*found, "--untie-embeddings-and-output-weights"]
