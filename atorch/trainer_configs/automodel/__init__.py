"""NeMo AutoModel's recipes (YAML), alone or named in a command that overrides their keys.

Keys and defaults are those of nemo_automodel/recipes/_dist_utils.py and components/distributed/config.py at the commit
of `known/automodel.json`. Weights have the type of the checkpoint, unless `model.torch_dtype` says more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from atorch.trainer_configs.automodel.recipe import command, lacking, write
from atorch.trainer_configs.keys import SCHEDULES, Keys, lora_of, read_launcher, split_launch
from atorch.trainer_configs.setup import NO_EFFECT, Draft, Entry, Kind, Target, TrainingSetup, dtype_of
from atorch.trainer_configs.source import Fields, Source, options_of, values_of

STRATEGIES: Mapping[str, str] = {
    **{"fsdp2": "fsdp2", "ddp": "ddp", "megatron_fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"},
}
PASSED_ON = ("model", "optimizer", "loss_fn")  # sections whose further keys are arguments of _target_
OFF = ("false", "off", "none", "disabled", "no", "")
OPTIMIZERS: Mapping[str, str] = {
    **dict.fromkeys(("adam", "adamw", "fusedadam"), "adamw"),
    **{"adamw8bit": "adamw8bit", "adafactor": "adafactor", "lion": "lion", "muon": "muon", "sgd": "sgd"},
}


def recognises(source: Source) -> bool:
    if any("nemo_automodel" in word or re.search(r"(^|/)automodel$", word) for word in source.words):
        return True
    after = [word for before, word in pairwise(source.words) if before in ("-c", "--config")]  # of a script of its own
    named = source.beside(after[0]) if after and after[0].endswith((".yaml", ".yml")) else None
    data = values_of(named) if named is not None and named.is_file() else source.data
    return isinstance(data.get("step_scheduler"), Mapping) or "nemo_automodel" in str(data.get("model"))[:2000]


def _values(source: Source, draft: Draft, entries: list[Entry]) -> dict[str, Any]:
    """The values of the recipe, with those that a command overrides; the words none and null are null."""
    values: Any = dict(source.data)
    named = next((word for word in source.command if word.endswith((".yaml", ".yml"))), None)
    if named is not None:
        values = values_of(source.beside(named))
        entries.append(Entry("recipe", named, "used", "its keys follow"))
    options, _ = options_of(source.command)
    told = read_launcher(split_launch(source.command)[0], source.environment, draft)
    entries += [entry for entry in told if entry.key not in ("--config", "-c")]
    local = str(options.pop("--nproc-per-node", options.pop("--nproc_per_node", "")))
    if re.fullmatch(r"[1-9]\d{0,4}", local) and draft.fields["devices_per_node"] is None:
        draft.fields |= {"num_nodes": draft.fields["num_nodes"] or 1, "devices_per_node": int(local)}
        entries.append(Entry("--nproc-per-node", int(local), "used", "processes of a node"))
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
    draft, entries = Draft(), list[Entry]()
    fields = Fields(source.name, _values(source, draft, entries), "", entries)
    if isinstance(fields.data.get("benchmark"), Mapping) and draft.fields.get("num_nodes") is None:
        draft.fields["num_nodes"] = fields.within("benchmark").whole("num_nodes")
        fields.within("benchmark").tell_used("nodes", "num_nodes")
    has_adapters = _read_adapters(fields, draft)
    layers = _read_model(fields, draft)
    distributed = fields.within("distributed")
    _read_mesh(distributed, draft, layers)
    _read_experts(fields.within("model"), distributed, draft)
    _read_sharding(distributed, draft)
    _read_batches(fields, draft)
    _read_precision(fields, distributed, draft, has_adapters)
    _read_kernels(fields, distributed, draft)
    keys = Keys.of("automodel")
    for name in PASSED_ON:
        section: Any = fields.within(name)
        for key in section.data:
            if keys.note_of(f"{name}.{key}", section.data[key]) is None:
                section.tell(key, "unknown", "no such argument is known; AutoModel passes it on to what _target_ names")
    return draft.setup(TARGET.name, fields.finish(keys))


def _read_adapters(fields: Fields, draft: Draft) -> bool:
    """Add LoRA, and return whether there are adapters."""
    peft, quantized = fields.within("peft"), fields.within("quantization")
    is_4bit = bool(quantized.flag("load_in_4bit"))
    if peft.data:
        lora, kind = lora_of(peft.size("dim", 8), peft.data.get("target_modules"), bool(peft.flag("match_all_linear")))
        draft.knobs |= {"lora": lora} | ({"qlora": True} if is_4bit else {})
        note = f"lora {lora}: adapters beside frozen weights"
        peft.tell_used(note, "dim", "match_all_linear")
        peft.tell_given(kind, note if kind == "used" else "beside all linear layers of blocks", "target_modules")
        peft.tell_given("not expressed", "the estimate excludes none", "exclude_modules")
        if peft.flag("use_dora"):
            peft.tell("use_dora", "not expressed", "no magnitudes in the estimate")
    note = "qlora: frozen weights in 4 bits" if is_4bit and peft.data else "nothing is quantized"
    quantized.tell_used(note, "load_in_4bit")
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
    model.tell_used(f"the model {named}", "pretrained_model_name_or_path", "config")
    how = model.data.get("attn_implementation")
    if how == "eager":
        draft.knobs["attention"] = "eager"
    note = "attention eager: scores are written" if how == "eager" else "scores are not kept"
    model.tell_used(note, "attn_implementation")
    model.tell_given("not expressed", "blocks are transformers' own in the estimate", "use_liger_kernel")
    facts = shapes.known(named) if isinstance(named, str) else None
    return None if facts is None else int(facts["layers"])


def _read_mesh(fields: Fields, draft: Draft, layers: int | None) -> None:
    tensor, context, stages = map(fields.size, ("tp_size", "cp_size", "pp_size"))
    fields.tell_used(draft.split("tensor", tensor, "tensor_parallel"), "tp_size")
    by_tokens = tensor > 1 and bool(fields.flag("sequence_parallel") or fields.flag("enable_async_tensor_parallel"))
    if by_tokens:
        draft.add("sequence_parallel", mode="megatron")
    fields.tell_used("sequence_parallel (megatron)" if by_tokens else "no sequence_parallel", "sequence_parallel")
    fields.tell_used(draft.split("context", context, "context_parallel"), "cp_size")
    pipeline = fields.within("pipeline")
    if stages > 1 and "pipeline" not in fields.data:
        raise fields.invalid("pp_size", "AutoModel needs distributed.pipeline beside it, with its schedule")
    word = str(pipeline.data.get("pp_schedule") or "1f1b").lower().replace("_", "")
    if word not in SCHEDULES and stages > 1:
        raise pipeline.invalid("pp_schedule", f"the planner knows {', '.join(SCHEDULES)}")
    schedule, per_stage = SCHEDULES.get(word, "1f1b"), pipeline.whole("layers_per_stage")
    pieces = max(2, -(-layers // per_stage) // stages) if layers and per_stage else 2
    settings: dict[str, Any] = {} if schedule == "1f1b" else {"schedule": schedule}
    if schedule == "interleaved" and pieces > 2 and layers and pieces * stages <= layers:
        settings["interleave"] = pieces
    fields.tell_used(draft.split("pipeline", stages, "pipeline_parallel", **settings), "pp_size")
    if stages == 1:
        pipeline.tell_given("no effect", "there is one stage: pp_size is 1", *pipeline.data)
    pipeline.tell_given("not expressed" if schedule == "zero_bubble" else "used", schedule, "pp_schedule")
    pipeline.tell_used(f"{pieces} pieces of the model on a process", "layers_per_stage")


def _read_experts(model: Fields, fields: Fields, draft: Draft) -> None:
    backend = model.data.get("backend")
    word = str(backend.get("dispatcher")) if isinstance(backend, Mapping) else ""
    sends_once = {"dispatcher": "deepep"} if word in ("deepep", "hybridep", "uccl_ep") else {}
    note = draft.share_experts(fields.size("ep_size"), **sends_once)
    fields.tell_used(f"{note}, sent by {word}" if sends_once else note, "ep_size")


def _read_sharding(fields: Fields, draft: Draft) -> None:
    axes, old = draft.axes, str(fields.data.get("_target_", "")).lower()
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
        stage = fields.whole("zero_dp_strategy", 0, 3)
        if stage not in (0, 1, 2, 3):
            raise fields.invalid("zero_dp_strategy", "it is 0, 1, 2 or 3")
        name = ("ddp", "zero1", "zero2", "fsdp")[stage]
    if name != "ddp":
        draft.add(name)
    freed = "gathered parameters are kept for backward" if name == "zero2" else "gathered parameters are freed"
    note = f"{name}: {freed}" if name in ("fsdp", "zero2") else name
    fields.tell_setting("strategy", note)
    fields.tell_used(note, "_target_", "reshard_after_forward", "zero_dp_strategy")
    is_each = fields.flag("defer_fsdp_grad_sync") is False
    draft.fields["reduces_each"] = is_each
    when = "with each micro-batch" if is_each else "once a step"
    fields.tell_used(f"micro_batch: gradients are reduced {when}", "defer_fsdp_grad_sync")
    if isinstance(fields.data.get("offload_policy"), Mapping) and name in ("fsdp", "zero2"):
        draft.add("offload", parameters=1.0)
    fields.tell_used("offload: parameters, gradients and states in host memory", "offload_policy")
    _read_data_axes(fields, draft, strategy)


def _read_data_axes(fields: Fields, draft: Draft, strategy: str) -> None:
    axes = draft.axes
    size, copies = fields.whole("dp_size", -1), fields.size("dp_replicate_size")
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
    if size:
        fields.tell_used(f"{size} processes see different samples", "dp_size")
    fields.tell_given("assumed", "the processes left", "dp_size")
    if copies == 1 or size:
        fields.tell_used(f"data {copies}: copies of the shards", "dp_replicate_size")
    fields.tell_given("assumed", "no copies: how many processes there are is not known", "dp_replicate_size")


def _read_batches(fields: Fields, draft: Draft) -> None:
    steps, pipeline = fields.within("step_scheduler"), fields.within("distributed").within("pipeline")
    local, total = steps.whole("local_batch_size"), steps.whole("global_batch_size")
    micro = local
    if draft.axes.get("pipeline", 1) > 1:
        micro = pipeline.size("pp_microbatch_size")
        if local is not None and local % micro:
            raise steps.invalid("local_batch_size", f"micro-batches of {micro} (pp_microbatch_size) do not divide it")
    draft.fields |= {"micro_batch": micro, "global_batch": total}
    packed, data = fields.within("packed_sequence"), fields.data.get("dataset")
    for key in ("packed_sequence_size", "pack_size", "max_length"):
        size = packed.whole(key, 0)
        if size and draft.fields.get("seq") is None:
            draft.fields["seq"] = size
            packed.tell(key, "used", "tokens of a sample: samples are packed")
    if draft.fields.get("seq") is None and isinstance(data, Mapping):
        inner = Fields(fields.source, data)
        size = next((inner.whole(key) for key in ("seq_len", "seq_length", "max_length") if key in inner), None)
        draft.fields["seq"] = size
        fields.tell("dataset", "used" if size else "no effect", f"{size} tokens of a sample" if size else NO_EFFECT[1])


def _read_precision(fields: Fields, distributed: Fields, draft: Draft, has_adapters: bool) -> None:
    model, optimizer, knobs = fields.within("model"), fields.within("optimizer"), draft.knobs
    given = model.data.get("torch_dtype", model.data.get("dtype"))
    dtype = dtype_of(given)
    if dtype is None and given not in (None, "auto"):
        raise model.invalid("torch_dtype", "it is auto, bfloat16, float16 or float32")
    told: Kind = "used" if dtype else "assumed"
    dtype = dtype or "bf16"
    autocast = dtype_of(distributed.data.get("autocast_dtype"))
    masters, policy = bool(optimizer.flag("master_weights")), distributed.within("mp_policy")
    note = f"dtype {dtype}: weights without fp32 copies"
    if has_adapters:
        knobs |= {"dtype": dtype} if dtype != "bf16" else {}
        note = f"frozen weights in {dtype}"
    elif dtype == "fp32" or masters:
        if masters or (draft.has("fsdp", "zero2") and dtype_of(policy.data.get("param_dtype")) != "fp32"):
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
    model.tell_used(note, "dtype")
    optimizer.tell_used(note, "master_weights")
    if dtype_of(policy.data.get("reduce_dtype")) in ("bf16", "fp16"):
        draft.set_traits(reduced_itemsize=2.0)
    policy.tell_used("as FSDP gathers and reduces; see model.torch_dtype", *policy.data)
    distributed.tell_used(note, "autocast_dtype")
    kind = str(optimizer.data.get("_target_", "torch.optim.AdamW")).rpartition(".")[2].lower()
    name = OPTIMIZERS.get(kind)
    if "bfloat16" in str(optimizer.data.get("exp_avg_dtype")) and name == "adamw":
        name = "adamw_bf16"
    knobs |= {"optimizer": name} if name not in (None, "adamw") else {}
    note = f"optimizer {name or 'adamw'}"
    optimizer.tell_given(*(("used", note) if name else ("not expressed", f"{note} in the estimate")), "_target_")
    optimizer.tell_used(note, "exp_avg_dtype", "exp_avg_sq_dtype")


def _read_kernels(fields: Fields, distributed: Fields, draft: Draft) -> None:
    """Recomputation, compilation, the loss and fp8."""
    word = str(distributed.data.get("activation_checkpointing", "false")).lower().replace("-", "_")
    if word not in (*OFF, "true", "on", "full", "enabled", "yes", "selective"):
        raise distributed.invalid("activation_checkpointing", "it is true, false, full or selective")
    if word not in OFF:
        draft.add("checkpoint", **({"selective": True} if word == "selective" else {}))
    note = "activations are kept" if word in OFF else "checkpoint: blocks are recomputed"
    distributed.tell_used(note, "activation_checkpointing")
    compiled = fields.within("compile")
    if compiled.flag("enabled") or distributed.flag("enable_compile"):
        draft.add("compile")
    note = "compile: the blocks" if draft.has("compile") else "blocks are not compiled"
    compiled.tell_used(note, "enabled")
    distributed.tell_used(note, "enable_compile")
    if isinstance(fields.data.get("loss_fn"), Mapping):
        loss = fields.within("loss_fn")
        name = str(loss.data.get("_target_")).rpartition(".")[2]
        if "Linear" in name:
            draft.add("cross_entropy")
        note = "cross_entropy: the loss by chunks of tokens" if "Linear" in name else "logits are held whole"
        loss.tell_given("not expressed" if "Chunked" in name else "used", note, "_target_")
    eights = fields.within("fp8")
    if eights.flag("enabled"):
        recipe = eights.word("recipe_name", ("tensorwise", "rowwise", "rowwise_with_gw_hp")) or "tensorwise"
        scaling = {"rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise_gw_hp"}.get(recipe)
        draft.add("fp8", exclude=["head"], **({"scaling": scaling} if scaling else {}))
    note = "fp8: products of blocks in 8 bits" if eights.flag("enabled") else "no fp8"
    eights.tell_used(note, "enabled", "recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather")
    backend = fields.within("model").data.get("backend")
    if isinstance(backend, Mapping) and backend.get("te_fp8"):
        fields.within("model").tell("backend", "not expressed", "te_fp8: products are in 16 bits in the estimate")


TARGET = Target("automodel", "NeMo AutoModel", recognises, read, lacking, write, command)
