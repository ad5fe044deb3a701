"""DeepSpeed's configuration (JSON): ZeRO, offloading, precision, batches and parallelism.

Keys and defaults are those of deepspeed/runtime/config.py, zero/config.py and docs/_pages/config-json.md at
edaa7221267243c7be7fb49c5d5f5c4fb97b4641. A value "auto" is one that Transformers or Accelerate fill in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atorch.trainer_configs import transformers
from atorch.trainer_configs.keys import TORCHRUN, Keys, read_optimizer
from atorch.trainer_configs.setup import (
    DTYPES,
    NARROW,
    Draft,
    Entry,
    Kind,
    Target,
    TrainingSetup,
    dtype_of,
    lacking_methods,
)
from atorch.trainer_configs.source import Fields, Source

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

CONFIG = "ds_config.json"
BATCHES: Mapping[str, tuple[str, str]] = {
    "train_batch_size": ("global_batch", "samples of a step on all devices"),
    "train_micro_batch_size_per_gpu": ("micro_batch", "samples of a micro-batch"),
    "gradient_accumulation_steps": ("accumulation", "micro-batches of a step"),
}
STAGES: Mapping[int, tuple[str, str]] = {
    0: ("ddp", "ddp: every process holds all"),
    1: ("zero1", "zero1: optimizer states are sharded"),
    2: ("zero2", "zero2: gradients and optimizer states are sharded, and parameters are whole"),
    3: ("fsdp", "fsdp: parameters, gradients and optimizer states are sharded"),
}
WHOLE: Mapping[str, bool] = {"keeps_whole": True, "casts_shards": False}
"""Stage 2 has whole parameters in 16 bits (zero/stage_1_and_2.py), and stage 3 shards of them, beside fp32 masters."""
HALF = "half: weights and gradients in {}, and fp32 copies that the optimizer steps"
ABSENT: Mapping[str, str] = {
    "chunk": "DeepSpeed offloads whole kinds of state, without a budget",
    "context_parallel": "DeepSpeed splits sequences by heads alone (sequence_parallel)",
    "pipeline_parallel": "DeepSpeed's stages are made in code (PipelineModule), not in a file",
    "fp8": "DeepSpeed's file has no fp8",
    "compile": "DeepSpeed's file has no torch.compile of blocks",
    "module_replace": "DeepSpeed's file replaces no modules",
}
KNOBS: Mapping[str, tuple[str, ...]] = {
    **{"half": ("dtype",), "amp_native": ("dtype",), "micro_batch": ("size", "count", "reduce")},
    **{"parallel_mode": ("slices",), "offload": ("optimizer", "parameters")},
}
"""Knobs by method that a file of DeepSpeed can express."""
OPTIMIZERS: Mapping[str, tuple[str, Kind]] = {
    **dict.fromkeys(("adam", "adamw", "muadam", "muadamw"), ("adamw", "used")),
    **dict.fromkeys(("sgd", "musgd"), ("sgd", "used")),
    **{"lion": ("lion", "used"), "muon": ("muon", "used"), "adagrad": ("lion", "not expressed")},
    "auto": ("adamw", "assumed"),
}


def recognises(source: Source) -> bool:
    keys = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
    starts = source.words[:1] == ("deepspeed",) or any(word.startswith("--deepspeed") for word in source.words)
    return starts or any(key in source.data for key in keys)


def read(source: Source) -> TrainingSetup:
    draft = Draft(traits=TARGET.traits)
    if source.words:
        return transformers.read_command(source, draft, TARGET.name)
    return draft.setup(TARGET.name, read_config(Fields(source.name, source.data), draft))


def read_config(fields: Fields, draft: Draft, filled_by: str = "") -> tuple[Entry, ...]:
    """Add what a configuration of DeepSpeed means, and return the entries.

    filled_by: the trainer that fills "auto" in with what `draft` has already.
    """
    draft.set_traits(**WHOLE)
    _read_precision(fields, draft, filled_by)
    _read_batches(fields, draft, filled_by)
    _read_zero(fields, draft)
    _read_reductions(fields, draft)
    read_optimizer(fields.within("optimizer"), "type", OPTIMIZERS, draft)
    _read_parallelism(fields, draft)
    fields.within("activation_checkpointing")
    return fields.finish(Keys.of(TARGET.name))


def _read_precision(fields: Fields, draft: Draft, filled_by: str) -> None:
    """Half precision if bf16 or fp16 is enabled. "auto" is what the trainer says; else bf16 is, and then fp16."""
    is_on: dict[str, bool] = {}
    for key, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        section = fields.within(key)
        if "enabled" not in section.data:
            continue
        found = section.flag("enabled")
        if found is None:
            found = draft.precision == dtype if filled_by else not any(is_on.values())
            why = f"as {filled_by} says" if filled_by else "assumed"
            section.tell("enabled", "assumed", f"{HALF.format(dtype)}: {why}" if found else f"off: {why}")
        section.tell("enabled", "used", HALF.format(dtype) if found else f"no {dtype}")
        is_on[dtype] = is_on.get(dtype, False) or found
        if found and section.flag(f"{dtype}_master_weights_and_grads"):
            draft.knobs["dtype"] = dtype
            is_on[dtype] = False
            section.tell_used(f"dtype {dtype}: no fp32 copies of weights", f"{dtype}_master_weights_and_grads")
    if sum(is_on.values()) > 1:
        raise fields.invalid("fp16", "bf16 is enabled as well, and DeepSpeed takes one of them; disable the other")
    for dtype, on in is_on.items():
        if on:
            draft.add("half", dtype=dtype)
    for key in ("amp", "torch_autocast"):
        section = fields.within(key)
        if section.flag("enabled"):
            dtype = dtype_of(section.data.get("dtype")) or "bf16" if key == "torch_autocast" else "fp16"
            draft.add("amp_native", dtype=dtype)
            section.tell("enabled", "used", f"amp_native: products in {dtype}")
    if is_on or draft.has("amp_native"):
        draft.precision = None


def _read_batches(fields: Fields, draft: Draft, filled_by: str) -> None:
    for key, (name, words) in BATCHES.items():
        value, held = fields.whole(key), draft.fields.get(name)
        if value is not None:
            if filled_by and held not in (None, value):
                raise fields.invalid(key, f"{filled_by} says {held}; make them equal, or give 'auto' here")
            draft.fields[name] = value
            fields.tell(key, "used", words)
        elif key in fields.data:
            why = f"{held}, as {filled_by} says" if held else "the trainer fills it in"
            fields.tell(key, "assumed", f"{words}: {why}")
    total, micro, count = (draft.fields.get(name) for name, _ in BATCHES.values())
    if count is None and (total is None) != (micro is None) and "gradient_accumulation_steps" not in fields:
        draft.fields["accumulation"] = 1
        fields.tell("gradient_accumulation_steps", "assumed", "1, DeepSpeed's default")


def _read_zero(fields: Fields, draft: Draft) -> None:
    if isinstance(fields.data.get("zero_optimization"), bool):
        stage = int(fields.data["zero_optimization"])
        fields.tell("zero_optimization", "used", f"{STAGES[stage][1]}; the old form of stage {stage}")
        draft.add(STAGES[stage][0])
        return
    zero = fields.within("zero_optimization")
    stage = zero.whole("stage", 0) or 0
    if stage not in STAGES:
        raise zero.invalid("stage", "stages are 0 to 3")
    zero.tell("stage", "used" if "stage" in zero.data else "assumed", STAGES[stage][1])
    config: dict[str, Any] = {}
    draft.fields["reduces_each"] = stage >= 2
    hpz = zero.whole("zero_hpz_partition_size", 0) or 1
    if hpz > 1 and stage == 3:
        config["reshard_after_forward"] = hpz
    zero.tell_used(f"weights are kept over {hpz} processes for backward", "zero_hpz_partition_size")
    shards = zero.whole("mics_shard_size", -1)
    if shards is not None and shards > 0:
        draft.axes["zero"] = shards
    draft.add(STAGES[stage][0], **config)
    _read_offload(zero, draft, stage)


def _read_reductions(fields: Fields, draft: Draft) -> None:
    """The types that gradients are sent and accumulated in, by default that of the weights, and their buffers."""
    if draft.has("zero1", "zero2", "fsdp") and isinstance(fields.data.get("zero_optimization"), Mapping):
        _read_buckets(fields.within("zero_optimization"), draft)
    sent = fields.word("communication_data_type", ("fp32", "fp16", "bf16"))
    if sent is not None:
        draft.set_traits(reduced_itemsize=4.0 if sent == "fp32" else 2.0)
        is_sharded = draft.has("zero2", "fsdp")
        note = f"gradients are reduced in {sent}" if is_sharded else "gradients are reduced as they are held"
        fields.tell("communication_data_type", "used" if is_sharded else "not expressed", note)
    types = fields.within("data_types")
    held = types.word("grad_accum_dtype", tuple(DTYPES))
    if held is not None:
        draft.set_traits(main_grad_itemsize=4.0 if held == "fp32" else 2.0)
        types.tell("grad_accum_dtype", "used", f"gradients accumulate in {held}")


def _read_buckets(zero: Fields, draft: Draft) -> None:
    """Buffers of `reduce_bucket_size` gradients: two below stage 3 if communication overlaps (`ipg_buffer`).

    By default it does in stage 3 alone (zero/config.py, `overlap_comm_valid`).
    """
    overlaps = zero.flag("overlap_comm")
    overlaps = draft.has("fsdp") if overlaps is None else overlaps
    draft.set_traits(overlaps=overlaps)
    zero.tell_setting("overlap_comm", f"communication {'overlaps' if overlaps else 'does not overlap'} with backward")
    number = 2 if overlaps and not draft.has("fsdp") else 1
    size = zero.whole("reduce_bucket_size", 0)
    if zero.data.get("reduce_bucket_size") == "auto":
        zero.tell("reduce_bucket_size", "assumed", "the trainer fills in the hidden size squared, which is little")
        return
    size = 500_000_000 if size is None else size
    draft.set_traits(bucket_bytes=float(number * size * (2 if draft.has("half") else 4)))
    note = f"{number} × {size:,} gradients in buffers"
    zero.tell_setting("reduce_bucket_size", note)


def _read_offload(zero: Fields, draft: Draft, stage: int) -> None:
    share = _offloaded(zero, "offload_optimizer", "cpu_offload", "offload: the host holds and steps optimizer states")
    both = _offloaded(zero, "offload_param", "cpu_offload_param", "offload: parameters wait in host memory")
    if both and stage != 3:
        for key in ("offload_param", "cpu_offload_param"):
            if key in zero.data:
                zero.within("offload_param").tell("device", "no effect", f"stage {stage} keeps parameters on devices")
        both = 0.0
    if both and share < 1:
        note = "offload: the host steps what is offloaded, so it has the optimizer's states as well"
        zero.within("offload_optimizer").tell("device", "assumed", note)
        share = 1.0
    if share and stage == 0:
        raise zero.invalid("offload_optimizer", "stage 0 shards nothing that could be offloaded; give stage 1 to 3")
    if share:
        draft.add("offload", optimizer=share, **({"parameters": both} if both else {}))
        # Stage 2 adds them up there (accumulated_grads_in_cpu); stage 3 has its grad_partitions_flat_buffer there.
        draft.set_traits(offloads_gradients=stage >= 2)


def _offloaded(zero: Fields, key: str, old: str, note: str) -> float:
    """The share that one of the sections for offloading puts on the host."""
    if zero.flag(old):
        zero.tell(old, "used", f"{note}; the old form of {key}")
        return 1.0
    section = zero.within(key)
    device = section.word("device", ("none", "cpu", "nvme", "auto")) or "none"
    ratio = section.data.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise section.invalid("ratio", "it is a share from 0 to 1")
    if device == "nvme":
        section.tell("device", "not expressed", f"{note}; atorch has no NVMe, and the estimate has host memory")
    section.tell_used("nothing is offloaded" if device in ("none", "auto") else note, "device")
    return 0.0 if device in ("none", "auto") else float(ratio)


def _read_parallelism(fields: Fields, draft: Draft) -> None:
    tensor = fields.within("tensor_parallel")
    sizes = [tensor.whole("autotp_size", 0), tensor.within("tp").whole("tp_size", 0), tensor.whole("tp_size", 0)]
    size = max((size for size in sizes if size is not None), default=0)
    draft.split("tensor", size, "tensor_parallel")
    draft.split("sequence", fields.whole("sequence_parallel_size", 0), "sequence_parallel")
    if size > 1 and draft.has("fsdp"):
        raise tensor.invalid("autotp_size", "DeepSpeed splits by tensors with ZeRO stages 0 to 2; give one of them")
    if isinstance(fields.data.get("pipeline"), bool):
        fields.tell("pipeline", "not expressed", "stages are made in code, and their number is not in the file")
        return
    pipeline = fields.within("pipeline")
    stages = None if isinstance(pipeline.data.get("stages"), str) else pipeline.whole("stages", 0)
    if stages:
        pipeline.tell_used("pipeline_parallel: stages under 1F1B", "stages")
    draft.split("pipeline", stages, "pipeline_parallel")
    if pipeline.whole("activation_checkpoint_interval", 0):
        draft.add("checkpoint")


def lacking(strategy: Strategy) -> Iterator[str]:
    yield from lacking_methods(strategy, ABSENT, KNOBS)
    for method in strategy:
        if method.name == "offload" and 0 < getattr(method, "parameters", 0) < 1:
            yield f"{method}: DeepSpeed offloads all parameters or none"
    names = strategy.names()
    sizes = {axis: size for method in strategy for axis, size in getattr(method, "slices", ())}
    sharding = next((name for name in ("zero2", "fsdp") if name in names), None)
    reduces = next((getattr(method, "reduce", None) for method in strategy if method.name == "micro_batch"), None)
    if reduces == "once" and sharding:
        yield f"{sharding} with micro_batch: DeepSpeed's stages 2 and 3 reduce gradients with each micro-batch"
    if "tensor_parallel" in names and ("fsdp" in names or "sequence_parallel" in names):
        yield "tensor_parallel with fsdp or sequence_parallel: DeepSpeed has it with ZeRO stages 0 to 2 alone"
    if sizes.get("zero", 1) > 1:
        yield "shards with copies between them (the axis zero): MiCS is made in code"
    if "offload" in names and "ddp" in names:
        yield "offload with ddp: DeepSpeed offloads with ZeRO stages 1 to 3"


def write(setup: TrainingSetup) -> dict[str, str]:
    return {
        CONFIG: json.dumps(config_of(setup), indent=2) + "\n",
        transformers.NAME: transformers.text_of(setup, deepspeed=CONFIG),
    }


def config_of(setup: TrainingSetup) -> dict[str, Any]:
    """The values of the file of a setup that `lacks` nothing."""
    world = setup.world_size or 1
    strategy = setup.strategy(world)
    micro, count, total = setup.batches(world)
    methods: dict[str, Any] = {method.name: method for method in strategy}
    stage = next((number for number, (name, _) in STAGES.items() if name in methods), 2 if "offload" in methods else 0)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    config: dict[str, Any] = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": count,
        "zero_optimization": zero,
        "bf16": {"enabled": False},
    }
    if "half" in methods:
        config["bf16"] = {"enabled": methods["half"].dtype == "bf16"}
        if methods["half"].dtype == "fp16":
            config["fp16"] = {"enabled": True}
    if "amp_native" in methods:
        config["torch_autocast"] = {"enabled": True, "dtype": DTYPES[methods["amp_native"].dtype]}
    offload = methods.get("offload")
    if offload is not None:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if offload.optimizer != 1:
            zero["offload_optimizer"]["ratio"] = offload.optimizer
        if offload.parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if setup.axes.get("tensor", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": setup.axes["tensor"]}
    if setup.axes.get("sequence", 1) > 1:
        config |= {"sequence_parallel_size": setup.axes["sequence"], "data_parallel_size": setup.shares(world)}
    optimizer = setup.knobs.get("optimizer")
    if optimizer in ("lion", "muon"):
        config["optimizer"] = {"type": optimizer.capitalize(), "params": {"lr": 1e-4}}
    return config


def command(setup: TrainingSetup) -> str:
    return f"{TORCHRUN} train.py {transformers.flags_of(setup, deepspeed=CONFIG)}"


TRAITS = NARROW._replace(cost={**NARROW.cost, **WHOLE})
TARGET = Target("deepspeed", "DeepSpeed", recognises, read, lacking, write, command, TRAITS)
