"""NeMo AutoModel's recipe for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError
from atorch.trainer_configs.keys import TORCHRUN
from atorch.trainer_configs.setup import DTYPES, TrainingSetup, lacking_methods
from atorch.trainer_configs.source import yaml_text

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

NAME = "automodel.yaml"
APP = "nemo_automodel.cli.app"
ABSENT: Mapping[str, str] = {
    "chunk": "AutoModel has no budget of device memory",
    "module_replace": "AutoModel has its own kernels",
    "zero1": "AutoModel's FSDP2 shards gradients or more: use zero2 or fsdp",
}
KNOBS: Mapping[str, tuple[str, ...]] = {
    **{"half": ("dtype",), "amp_native": ("dtype",), "parallel_mode": ("slices",), "fsdp": (), "zero2": ()},
    **{"micro_batch": ("size", "count", "reduce"), "checkpoint": ("selective",), "sequence_parallel": ("mode",)},
    **{"pipeline_parallel": ("schedule", "micro_batches"), "offload": ("parameters", "optimizer")},
    **{"fp8": ("exclude", "scaling"), "compile": (), "cross_entropy": (), "context_parallel": ()},
    "expert_parallel": ("size",),
}


def lacking(strategy: Strategy) -> Iterator[str]:
    methods: dict[str, Any] = {method.name: method for method in strategy}
    yield from lacking_methods(strategy, ABSENT, KNOBS)
    sharding = next((name for name in ("zero2", "fsdp") if name in methods), None)
    splits = {"tensor_parallel", "context_parallel", "pipeline_parallel"}.intersection(methods)
    for name in ("half", "amp_native"):
        if name in methods and methods[name].dtype != "bf16":
            yield f"{methods[name]}: AutoModel's mixed precision is bf16"
    if "amp_native" in methods and (sharding or splits):
        yield "amp_native with fsdp, zero2 or a split: AutoModel casts what FSDP gathers; use half"
    if "ddp" in methods and splits:
        yield f"ddp with {' and '.join(sorted(splits))}: AutoModel splits beside fsdp2 alone"
    if "ddp" in methods and "half" in methods:
        yield "half with ddp: AutoModel has fp32 copies with fsdp2 alone"
    if getattr(methods.get("sequence_parallel"), "mode", "megatron") != "megatron":
        yield "sequence_parallel (ulysses): AutoModel splits sequences by context_parallel"
    if getattr(methods.get("pipeline_parallel"), "schedule", "1f1b") == "zero_bubble":
        yield "pipeline_parallel (zero_bubble): AutoModel's has two pieces of the model on a process"
    offload = methods.get("offload")
    if offload is not None and (not sharding or (offload.parameters, offload.optimizer) != (1.0, 1.0)):
        yield f"{offload}: AutoModel offloads parameters, gradients and states together, with fsdp2"


def write(setup: TrainingSetup) -> dict[str, str]:
    return {NAME: yaml_text(recipe(setup))}


def recipe(setup: TrainingSetup) -> dict[str, Any]:
    """The values of the recipe of a setup that `lacks` nothing.

    Raises:
        ArgumentError: AutoModel lacks the optimizer.
    """
    world, knobs = setup.world_size or 1, setup.knobs
    strategy, shares = setup.strategy(world), setup.shares(world)
    micro, count, total = setup.batches(world)
    methods: dict[str, Any] = {method.name: method for method in strategy}
    sharding = next((name for name in ("zero2", "fsdp") if name in methods), None)
    zero = setup.axes.get("zero", 1)
    sizes = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
    distributed: dict[str, Any] = {
        "strategy": "ddp" if "ddp" in methods else "fsdp2",
        "dp_size": shares,
        **{f"{name}_size": setup.axes.get(axis, 1) for name, axis in sizes.items()},
    }
    if sharding is not None:
        is_each = getattr(methods.get("micro_batch"), "reduce", "once") == "each"
        distributed |= {"reshard_after_forward": sharding == "fsdp", "defer_fsdp_grad_sync": not is_each}
        distributed |= {"dp_replicate_size": shares // zero} if zero > 1 else {}
    if "sequence_parallel" in methods:
        distributed["sequence_parallel"] = True
    distributed |= {"ep_size": methods["expert_parallel"].size} if "expert_parallel" in methods else {}
    stages = methods.get("pipeline_parallel")
    if stages is not None:
        word = {"interleaved": "interleaved1f1b"}.get(stages.schedule, stages.schedule)
        distributed["pipeline"] = {"pp_schedule": word, "pp_microbatch_size": micro}
    if "checkpoint" in methods:
        distributed["activation_checkpointing"] = "selective" if methods["checkpoint"].selective else True
    if "offload" in methods:
        distributed["offload_policy"] = {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}
    if "amp_native" in methods:
        distributed["autocast_dtype"] = "bfloat16"
    masters = "half" in methods or "amp_native" in methods
    dtype = DTYPES[knobs.get("dtype") or "fp32"]
    is_adapted = bool(knobs.get("lora") or knobs.get("qlora"))
    if not masters and dtype == "float32" and sharding is not None and not is_adapted:
        distributed["mp_policy"] = {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "param_dtype": "float32"}
    found: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "step_scheduler": {
            "global_batch_size": total,
            "local_batch_size": (micro or 1) * (count or 1) if stages is not None else micro,
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": setup.model or "path/to/your/model",
            "torch_dtype": "bfloat16" if is_adapted and not knobs.get("dtype") else dtype,
        },
        "distributed": distributed,
        "loss_fn": {"_target_": _LOSSES["cross_entropy" in methods]},
    }
    if knobs.get("attention") == "eager":
        found["model"]["attn_implementation"] = "eager"
    if "compile" in methods:
        found["compile"] = {"enabled": True}
    if "fp8" in methods:
        scaling = {"rowwise_gw_hp": "rowwise_with_gw_hp"}.get(methods["fp8"].scaling, methods["fp8"].scaling)
        found["fp8"] = {"enabled": True, "recipe_name": scaling, "filter_fqns": ["lm_head"]}
    if setup.seq is not None:
        target = "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset"
        found["dataset"] = {"_target_": target, "seq_len": setup.seq, "num_samples": 100000}
    return found | _adapters(setup) | {"optimizer": _optimizer(knobs.get("optimizer"))}


_LOSSES = (
    "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy",
)


def _adapters(setup: TrainingSetup) -> dict[str, Any]:
    if not (setup.knobs.get("lora") or setup.knobs.get("qlora")):
        return {}
    rank, _, targets = str(setup.knobs.get("lora") or 16).partition(":")
    from atorch.cost.adapted_profile import targets_of

    peft: dict[str, Any] = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": int(rank)}
    words = sorted(
        f"{name[0] if name in ('query', 'key', 'value', 'output') else name}_proj"
        for name in targets_of(targets or "all")
    )
    peft |= {"target_modules": [f"*.{word}" for word in words]} if targets else {"match_all_linear": True}
    quantized = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    return {"peft": peft} | ({"quantization": quantized} if setup.knobs.get("qlora") else {})


def _optimizer(name: str | None) -> dict[str, Any]:
    targets: dict[str | None, str] = {
        **{None: "torch.optim.AdamW", "adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"},
        **{"adamw8bit": "bitsandbytes.optim.AdamW8bit", "adafactor": "torch.optim.Adafactor"},
    }
    if name not in targets:
        known = ", ".join(word for word in targets if word)
        raise ArgumentError(f"AutoModel's recipes have no optimizer {name} that atorch writes; it writes {known}")
    return {"_target_": targets[name], "lr": 1e-5}


def command(setup: TrainingSetup) -> str:
    return f"{TORCHRUN} -m {APP} {NAME}"
