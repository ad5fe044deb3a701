"""NeMo AutoModel's recipes (YAML), alone or named in a command that overrides their keys.

Keys and defaults are those of nemo_automodel/recipes/_dist_utils.py and components/distributed/config.py at the commit
of `known/automodel.json`. Weights have the type of the checkpoint, unless `model.torch_dtype` says more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from atorch.trainer_configs.automodel.recipe import command, lacks, write
from atorch.trainer_configs.keys import NO_EFFECT, Keys, file_of, number, processes, split_launch, tell_not_expressed
from atorch.trainer_configs.setup import Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.shell import command_of
from atorch.trainer_configs.source import Fields, Source, options_of, values_of

SCHEDULES: Mapping[str, str] = {
    **{"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zerobubble": "zero_bubble"},
    **dict.fromkeys(("interleavedzerobubble", "zbvzerobubble", "dualpipev"), "zero_bubble"),
}
STRATEGIES: Mapping[str, str] = {
    **{"fsdp2": "fsdp2", "ddp": "ddp", "megatron_fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"},
}
PASSED_ON = ("model", "optimizer", "loss_fn")  # sections whose further keys are arguments of _target_
OFF = ("false", "off", "none", "disabled", "no", "")
DTYPES: Mapping[str, str] = {
    **{"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"},
    **{"fp32": "fp32", "float32": "fp32", "float": "fp32"},
}
OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adam", "adamw", "fusedadam"), "adamw"),
    **{"adamw8bit": "adamw8bit", "adafactor": "adafactor", "lion": "lion", "muon": "muon", "sgd": "sgd"},
}
PROJECTIONS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def recognises(source: Source) -> bool:
    if any("nemo_automodel" in word or re.search(r"(^|/)automodel$", word) for word in source.words):
        return True
    after = [word for before, word in pairwise(source.words) if before in ("-c", "--config")]  # of a script of its own
    path = file_of(source, after[0]) if after and after[0].endswith((".yaml", ".yml")) else None
    data = source.data if path is None else values_of(path)
    return isinstance(data.get("step_scheduler"), Mapping) or "nemo_automodel" in str(data.get("model"))[:2000]


def _values(source: Source, draft: Draft, entries: list[Entry]) -> dict[str, Any]:
    """The values of the recipe, with those that a command overrides; the words none and null are null."""
    command, _ = command_of(source)
    values: Any = dict(source.data)
    named = next((word for word in command.words if word.endswith((".yaml", ".yml"))), None)
    if named is not None:
        values = values_of(file_of(source, named) or Path(named))
        entries.append(Entry("recipe", named, "used", "its keys follow"))
    options, _ = options_of(command.words)
    nodes, per_node, told = processes(split_launch(command.words)[0], command.variables)
    local = str(options.pop("--nproc-per-node", options.pop("--nproc_per_node", "")))
    if re.fullmatch(r"[1-9]\d{0,4}", local) and per_node is None:
        nodes, per_node = nodes or 1, int(local)
        entries.append(Entry("--nproc-per-node", per_node, "used", "processes of a node"))
    draft.fields |= {"num_nodes": nodes, "devices_per_node": per_node}
    entries += [entry for entry in told if entry.key not in ("--config", "-c")]
    for option, value in options.items():
        *path, last = option.lstrip("-").split(".")
        inside = values
        for key in path:
            inside = inside.setdefault(key, {}) if isinstance(inside, dict) else {}
        if path and isinstance(inside, dict):
            inside[last] = value
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def read(source: Source) -> TrainingSetup:
    """See `Target.read`."""
    keys, draft, entries = Keys.of("automodel"), Draft(), list[Entry]()
    fields = Fields(source.name, _values(source, draft, entries), "", entries)
    nodes = fields.within("benchmark") if isinstance(fields.data.get("benchmark"), Mapping) else None
    if nodes is not None and draft.fields.get("num_nodes") is None:
        draft.fields["num_nodes"] = number(nodes, "num_nodes")
        nodes.tell_all({"num_nodes": ("used", "nodes")})
    has_adapters = _read_adapters(fields, draft)
    layers = _read_model(fields, draft)
    distributed = fields.within("distributed")
    _read_mesh(distributed, draft, layers)
    _read_experts(fields.within("model"), distributed, draft)
    _read_sharding(distributed, draft)
    _read_batches(fields, draft)
    _read_precision(fields, distributed, draft, has_adapters)
    _read_kernels(fields, distributed, draft)
    for inner, section in _sections(fields):
        tell_not_expressed(inner, keys)
        known = keys.types[section]
        for key in inner.data:
            if key in known:
                inner.tell(key, *NO_EFFECT)
            elif section in PASSED_ON:
                inner.tell(key, "unknown", "no such argument is known; AutoModel passes it on to what _target_ names")
    return draft.setup(TARGET.name, fields.finish([key for names in keys.types.values() for key in names]))


def _sections(fields: Fields) -> Iterator[tuple[Fields, str]]:
    yield fields, "$"
    for name in ("distributed", "step_scheduler", "peft", "fp8", "compile", "packed_sequence", "quantization", "model",
                 "optimizer", "loss_fn", "benchmark"):  # fmt: skip
        if isinstance(fields.data.get(name), Mapping):
            yield fields.within(name), name
    distributed = fields.within("distributed")
    for name in ("pipeline", "moe", "mp_policy", "offload_policy"):
        if isinstance(distributed.data.get(name), Mapping):
            yield distributed.within(name), f"distributed.{name}"


def _read_adapters(fields: Fields, draft: Draft) -> bool:
    peft, quantized = fields.within("peft"), fields.within("quantization")
    is_4bit = bool(quantized.flag("load_in_4bit"))
    if peft.data:
        rank = number(peft, "dim", default=8)
        targets = peft.data.get("target_modules")
        names = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
        bare = {str(name).rpartition(".")[2] for name in names}
        all_of = bool(peft.flag("match_all_linear")) or not bare or "*_proj" in bare
        known = all_of or bare <= PROJECTIONS
        draft.fields["knobs"]["lora"] = str(rank) if all_of or not known else f"{rank}:{','.join(sorted(bare))}"
        note = f"lora {draft.fields['knobs']['lora']}: adapters beside frozen weights"
        peft.tell_all({
            **dict.fromkeys(("dim", "match_all_linear"), ("used", note)),
            "target_modules": ("used", note) if known else ("not expressed", "beside all linear layers of blocks"),
            "exclude_modules": ("not expressed", "the estimate excludes none"),
            "use_dora": ("not expressed", "no magnitudes in the estimate") if peft.flag("use_dora") else NO_EFFECT,
        })  # fmt: skip
        draft.fields["knobs"] |= {"qlora": True} if is_4bit else {}
    note = "qlora: frozen weights in 4 bits" if is_4bit and peft.data else "nothing is quantized"
    quantized.tell_all({"load_in_4bit": ("used", note)})
    if quantized.flag("load_in_8bit"):
        quantized.tell("load_in_8bit", "not expressed", "frozen weights are in 16 bits in the estimate")
    return bool(peft.data)


def _read_model(fields: Fields, draft: Draft) -> int | None:
    """Set the model, and return its number of blocks if it is known."""
    from atorch.auto.sources import shapes

    model = fields.within("model")
    named = model.data.get("pretrained_model_name_or_path")
    config = model.data.get("config")
    if isinstance(config, Mapping):
        named = named or config.get("pretrained_model_name_or_path") or config.get("name_or_path")
    elif isinstance(config, str):
        named = named or config
    if isinstance(named, str):
        draft.fields["model"] = named
    model.tell_all(dict.fromkeys(("pretrained_model_name_or_path", "config"), ("used", f"the model {named}")))
    how = model.data.get("attn_implementation")
    if how == "eager":
        draft.fields["knobs"]["attention"] = "eager"
    note = "attention eager: scores are written" if how == "eager" else "scores are not kept"
    model.tell_all({
        "attn_implementation": ("used", note),
        "use_liger_kernel": ("not expressed", "blocks are transformers' own in the estimate"),
    })  # fmt: skip
    facts = shapes.known(named) if isinstance(named, str) else None
    return None if facts is None else int(facts["layers"])


def _read_mesh(fields: Fields, draft: Draft, layers: int | None) -> None:
    tensor, context, stages = (number(fields, f"{name}_size", default=1) or 1 for name in ("tp", "cp", "pp"))
    draft.split("tensor", tensor, "tensor_parallel")
    by_tokens = tensor > 1 and bool(fields.flag("sequence_parallel") or fields.flag("enable_async_tensor_parallel"))
    if by_tokens:
        draft.add("sequence_parallel", mode="megatron")
    draft.split("context", context, "context_parallel")
    pipeline = fields.within("pipeline")
    if stages > 1 and "pipeline" not in fields.data:
        raise fields.invalid("pp_size", "AutoModel needs distributed.pipeline beside it, with its schedule")
    word = str(pipeline.data.get("pp_schedule") or "1f1b").lower().replace("_", "")
    if word not in SCHEDULES and stages > 1:
        raise pipeline.invalid("pp_schedule", f"the planner knows {', '.join(SCHEDULES)}")
    schedule, per_stage = SCHEDULES.get(word, "1f1b"), number(pipeline, "layers_per_stage")
    pieces = max(2, -(-layers // per_stage) // stages) if layers and per_stage else 2
    settings: dict[str, Any] = {} if schedule == "1f1b" else {"schedule": schedule}
    if schedule == "interleaved" and pieces > 2 and layers and pieces * stages <= layers:
        settings["interleave"] = pieces
    draft.split("pipeline", stages, "pipeline_parallel", **settings)
    if stages == 1:
        pipeline.tell_all(dict.fromkeys(pipeline.data, ("no effect", "there is one stage: pp_size is 1")))
    told: Kind = "not expressed" if schedule == "zero_bubble" else "used"
    pipeline.tell_all({
        "pp_schedule": (told, schedule),
        "layers_per_stage": ("used", f"{pieces} pieces of the model on a process"),
        "round_virtual_stages_to_pp_multiple": ("used", "as layers_per_stage"),
        "pp_microbatch_size": ("used", "samples of a micro-batch"),
        **dict.fromkeys(("module_fqns_per_model_part", "pp_schedule_csv"), ("not expressed", "atorch's own cut")),
    })  # fmt: skip
    fields.tell_all({
        "tp_size": ("used", f"tensor {tensor}: tensor_parallel" if tensor > 1 else "no split"),
        "cp_size": ("used", f"context {context}: context_parallel" if context > 1 else "no split"),
        "pp_size": ("used", f"pipeline {stages}: pipeline_parallel" if stages > 1 else "no split"),
        "sequence_parallel": ("used", "sequence_parallel (megatron)" if by_tokens else "no sequence_parallel"),
    })  # fmt: skip


def _read_experts(model: Fields, fields: Fields, draft: Draft) -> None:
    backend = model.data.get("backend")
    word = str(backend.get("dispatcher")) if isinstance(backend, Mapping) else ""
    sends_once = {"dispatcher": "deepep"} if word in ("deepep", "hybridep", "uccl_ep") else {}
    told = draft.share_experts(number(fields, "ep_size", default=1) or 1, **sends_once)
    fields.tell_all({"ep_size": (told[0], f"{told[1]}, sent by {word}" if sends_once else told[1])})


def _read_sharding(fields: Fields, draft: Draft) -> None:
    axes, old = draft.fields["axes"], str(fields.data.get("_target_", "")).lower()
    default = "ddp" if "ddp" in old else "megatron_fsdp" if "megatron" in old or "nvfsdp" in old else "fsdp2"
    strategy = STRATEGIES.get(str(fields.data.get("strategy") or default).lower().replace("-", "_"))
    if strategy is None:
        raise fields.invalid("strategy", "it is fsdp2, megatron_fsdp or ddp")
    if strategy == "ddp" and axes:
        raise fields.invalid("strategy", f"AutoModel's ddp has no {' and no '.join(axes)} axis; use fsdp2")
    if strategy == "megatron_fsdp" and "pipeline" in axes:
        raise fields.invalid("strategy", "AutoModel's megatron_fsdp has no stages; use fsdp2")
    frees = fields.flag("reshard_after_forward")
    keeps = "pipeline" in axes if frees is None else not frees
    name = "ddp" if strategy == "ddp" else "zero2" if keeps else "fsdp"
    if strategy == "megatron_fsdp":
        stage = number(fields, "zero_dp_strategy", 0, 3)
        if stage not in (0, 1, 2, 3):
            raise fields.invalid("zero_dp_strategy", "it is 0, 1, 2 or 3")
        name = ("ddp", "zero1", "zero2", "fsdp")[stage]
    if name != "ddp":
        draft.add(name)
    freed = "gathered parameters are kept for backward" if name == "zero2" else "gathered parameters are freed"
    note = f"{name}: {freed}" if name in ("fsdp", "zero2") else name
    fields.tell("strategy", "used" if fields.data.get("strategy") else "assumed", note)
    fields.tell_all(dict.fromkeys(("_target_", "reshard_after_forward", "zero_dp_strategy"), ("used", note)))
    is_each = fields.flag("defer_fsdp_grad_sync") is False
    draft.fields["reduces_each"] = is_each
    when = "with each micro-batch" if is_each else "once a step"
    fields.tell_all({"defer_fsdp_grad_sync": ("used", f"micro_batch: gradients are reduced {when}")})
    if isinstance(fields.data.get("offload_policy"), Mapping) and name in ("fsdp", "zero2"):
        draft.add("offload", parameters=1.0)
    fields.tell_all({"offload_policy": ("used", "offload: parameters, gradients and states in host memory")})
    _read_data_axes(fields, draft, strategy)


def _read_data_axes(fields: Fields, draft: Draft, strategy: str) -> None:
    axes = draft.fields["axes"]
    size, copies = number(fields, "dp_size", -1), number(fields, "dp_replicate_size", default=1) or 1
    size = size if size is not None and size > 0 else None
    nodes, per_node = draft.fields.get("num_nodes"), draft.fields.get("devices_per_node")
    inner = axes.get("tensor", 1) * axes.get("context", 1) * axes.get("pipeline", 1)
    if size is None and copies > 1 and nodes and per_node:
        size = nodes * per_node // inner
    if copies > 1 and strategy != "fsdp2":
        raise fields.invalid("dp_replicate_size", "AutoModel has copies of shards with fsdp2 alone")
    if copies > 1 and size is not None:
        if size % copies:
            raise fields.invalid("dp_replicate_size", f"it does not divide the {size} data-parallel processes")
        axes |= {"data": copies, "zero": size // copies} if size > copies else {"data": copies}
    elif size is not None:
        axes["data"] = size
    lone: tuple[Kind, str] = ("assumed", "no copies: how many processes there are is not known")
    fields.tell_all({
        "dp_size": ("used", f"{size} processes see different samples") if size else ("assumed", "the processes left"),
        "dp_replicate_size": ("used", f"data {copies}: copies of the shards") if copies == 1 or size else lone,
    })  # fmt: skip


def _read_batches(fields: Fields, draft: Draft) -> None:
    steps, pipeline = fields.within("step_scheduler"), fields.within("distributed").within("pipeline")
    local, total = number(steps, "local_batch_size"), number(steps, "global_batch_size")
    micro = local
    if draft.fields["axes"].get("pipeline", 1) > 1:
        micro = number(pipeline, "pp_microbatch_size", default=1)
        if local is not None and micro and local % micro:
            raise steps.invalid("local_batch_size", f"micro-batches of {micro} (pp_microbatch_size) do not divide it")
    draft.fields |= {"micro_batch": micro, "global_batch": total}
    steps.tell_all({
        "global_batch_size": ("used", "samples of a step on all devices"),
        "local_batch_size": ("used", "samples of a process in a pass, or of all micro-batches of a pipeline"),
        "dp_size": ("no effect", "it follows from distributed"),
    })  # fmt: skip
    packed, data = fields.within("packed_sequence"), fields.data.get("dataset")
    for key in ("packed_sequence_size", "pack_size", "max_length"):
        size = number(packed, key, 0)
        if size and draft.fields.get("seq") is None:
            draft.fields["seq"] = size
            packed.tell(key, "used", "tokens of a sample: samples are packed")
    packed.tell_all({"packed_sequence_size": ("used", "samples are not packed")})
    if draft.fields.get("seq") is None and isinstance(data, Mapping):
        inner = Fields(fields.source, data)
        size = next((number(inner, key) for key in ("seq_len", "seq_length", "max_length") if key in inner), None)
        draft.fields["seq"] = size
        fields.tell("dataset", "used" if size else "no effect", f"{size} tokens of a sample" if size else NO_EFFECT[1])


def _read_precision(fields: Fields, distributed: Fields, draft: Draft, has_adapters: bool) -> None:
    model, optimizer, knobs = fields.within("model"), fields.within("optimizer"), draft.fields["knobs"]
    given = model.data.get("torch_dtype", model.data.get("dtype"))
    dtype = DTYPES.get(str(given).removeprefix("torch."))
    if dtype is None and given not in (None, "auto"):
        raise model.invalid("torch_dtype", "it is auto, bfloat16, float16 or float32")
    told: Kind = "used" if dtype else "assumed"
    dtype = dtype or "bf16"
    autocast = DTYPES.get(str(distributed.data.get("autocast_dtype")).removeprefix("torch."))
    masters, policy = bool(optimizer.flag("master_weights")), distributed.within("mp_policy")
    note = f"dtype {dtype}: weights without fp32 copies"
    if has_adapters:
        knobs |= {"dtype": dtype} if dtype != "bf16" else {}
        note = f"frozen weights in {dtype}"
    elif dtype == "fp32" or masters:
        gathered = str(policy.data.get("param_dtype")).removeprefix("torch.")
        if masters or (draft.has("fsdp", "zero2") and DTYPES.get(gathered) != "fp32"):
            draft.add("half", dtype="bf16" if dtype == "fp32" else dtype)
            note = "half: computed in 16 bits, and the optimizer steps fp32 shards"
        elif autocast is not None:
            draft.add("amp_native", dtype=autocast)
            note = f"amp_native: products in {autocast}"
        else:
            note = "computed in fp32"
    else:
        knobs["dtype"] = dtype
    model.tell("torch_dtype", told, note if told == "used" else f"{note}, as the checkpoint has them")
    model.tell_all({"dtype": ("used", note)})
    optimizer.tell_all({"master_weights": ("used", note)})
    if str(policy.data.get("reduce_dtype")).removeprefix("torch.") in ("bfloat16", "float16"):
        draft.set_traits(reduced_itemsize=2.0)
    policy.tell_all(dict.fromkeys(policy.data, ("used", "as FSDP gathers and reduces; see model.torch_dtype")))
    distributed.tell_all({"autocast_dtype": ("used", note)})
    kind = str(optimizer.data.get("_target_", "torch.optim.AdamW")).rpartition(".")[2].lower()
    name = OPTIMIZERS.get(kind)
    if "bfloat16" in str(optimizer.data.get("exp_avg_dtype")) and name == "adamw":
        name = "adamw_bf16"
    knobs |= {"optimizer": name} if name not in (None, "adamw") else {}
    known: Kind = "used" if name else "not expressed"
    optimizer.tell_all({
        "_target_": (known, f"optimizer {name or 'adamw'}{'' if name else ' in the estimate'}"),
        **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), ("used", f"optimizer {name}")),
    })  # fmt: skip


def _read_kernels(fields: Fields, distributed: Fields, draft: Draft) -> None:
    """Recomputation, compilation, the loss and fp8."""
    word = str(distributed.data.get("activation_checkpointing", "false")).lower().replace("-", "_")
    if word not in (*OFF, "true", "on", "full", "enabled", "yes", "selective"):
        raise distributed.invalid("activation_checkpointing", "it is true, false, full or selective")
    if word not in OFF:
        draft.add("checkpoint", **({"selective": True} if word == "selective" else {}))
    note = "activations are kept" if word in OFF else "checkpoint: blocks are recomputed"
    distributed.tell_all({"activation_checkpointing": ("used", note)})
    compiled = fields.within("compile")
    if compiled.flag("enabled") or distributed.flag("enable_compile"):
        draft.add("compile")
    note = "compile: the blocks" if draft.has("compile") else "blocks are not compiled"
    compiled.tell_all({"enabled": ("used", note)})
    distributed.tell_all({"enable_compile": ("used", note)})
    loss = fields.within("loss_fn") if isinstance(fields.data.get("loss_fn"), Mapping) else None
    if loss is not None:
        name = str(loss.data.get("_target_")).rpartition(".")[2]
        if "Linear" in name:
            draft.add("cross_entropy")
        note = "cross_entropy: the loss by chunks of tokens" if "Linear" in name else "logits are held whole"
        loss.tell_all({"_target_": ("not expressed" if "Chunked" in name else "used", note)})
    eights = fields.within("fp8")
    if eights.flag("enabled"):
        recipe = eights.word("recipe_name", ("tensorwise", "rowwise", "rowwise_with_gw_hp")) or "tensorwise"
        scaling = {"rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise_gw_hp"}.get(recipe)
        draft.add("fp8", exclude=["head"], **({"scaling": scaling} if scaling else {}))
    note = "fp8: products of blocks in 8 bits" if eights.flag("enabled") else "no fp8"
    eights.tell_all(
        dict.fromkeys(("enabled", "recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather"), ("used", note))
    )
    backend = fields.within("model").data.get("backend")
    if isinstance(backend, Mapping) and backend.get("te_fp8"):
        fields.within("model").tell("backend", "not expressed", "te_fp8: products are in 16 bits in the estimate")


TARGET = Target(
    name="automodel",
    title="NeMo AutoModel",
    recognises=recognises,
    read=read,
    lacks=lacks,
    write=write,
    command=command,
)
