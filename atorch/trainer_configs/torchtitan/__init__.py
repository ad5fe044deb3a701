"""torchtitan's flags, with `--module` and `--config`, and its TOML of versions before 0.3.

Keys and defaults are those at the commit of `known/torchtitan.json`, and of v0.2.2 for TOML. A step is counted in
tokens since August 2026, and in samples before. torchtitan casts parameters to bf16 as FSDP gathers them, keeps fp32
shards, and reduces gradients in fp32 with every micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from atorch.trainer_configs.keys import SCHEDULES, Keys, read_launcher, split_launch
from atorch.trainer_configs.setup import Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.shell import is_known
from atorch.trainer_configs.source import Fields, Source, options_of, values_of
from atorch.trainer_configs.torchtitan.flags import CONTEXT, NAME, TOKENS, lacking, write

MICRO_BATCHES = "parallelism.num_pp_microbatches"
MODES = ("none", "selective", "full", "memory_budget")
RENAMED: Mapping[str, str] = {
    "training.batch_size": "training.local_batch_size",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.compile": "compile.enable",
}
"""Keys of early versions → those that took their place."""


def recognises(source: Source) -> bool:
    flags = [word for word in source.words if re.match(r"--(parallelism|training|activation_checkpoint|job)\.", word)]
    if flags or any("torchtitan" in word for word in source.words):
        return True
    if any(word.startswith("CONFIG_FILE=") or word.endswith("run_train.sh") for word in source.words):
        return True
    sections = [key for key in ("parallelism", "training", "job", "model") if isinstance(source.data.get(key), Mapping)]
    return len(sections) > 2 and ("flavor" in source.data["model"] if "model" in sections else True)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _values(source: Source, entries: list[Entry], draft: Draft) -> dict[str, Any]:
    """The values by dotted key: flags over those of the TOML file, early names as the later ones."""
    launcher, _, words = split_launch(source.command)
    variables = source.environment
    entries += read_launcher(launcher, variables, draft)
    values = dict(_flat(source.data))
    modes = [word.partition(":")[2] for word in words if re.match(r"activation[-_]checkpoint:", word)]
    options = options_of([word for word in words if not re.match(r"[a-z_-]+:[a-z-]+$", word)])[0]
    given = {name.lstrip("-").replace("-", "_"): value for name, value in options.items()}
    named = given.get("job.config_file", variables.get("CONFIG_FILE"))
    if isinstance(named, str):
        path = source.beside(named)
        told: tuple[Kind, str] = ("assumed", "the file is not here: torchtitan's defaults in its place")
        if path.is_file():
            values |= dict(_flat(values_of(path)))
            told = ("used", "its values follow")
        entries.append(Entry("job.config_file", named, *told))
        given.pop("job.config_file", None)
    for name in ("module", "config"):
        if name.upper() in variables and name not in given:
            given[name] = variables[name.upper()]
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        negated = section and name.startswith("no_")
        values[f"{section}.{name[3:]}" if negated else key] = False if negated else value
    if modes:
        values["activation_checkpoint.mode"] = modes[-1].replace("-", "_")
    return {RENAMED.get(key, key): value for key, value in values.items()}


def read(source: Source) -> TrainingSetup:
    keys, draft, entries = Keys.of("torchtitan"), Draft(), list[Entry]()
    fields = Fields(source.name, _values(source, entries, draft), "", entries)
    config: Mapping[str, Any] = keys.facts["configs"].get(str(fields.data.get("config")), {})
    is_new = TOKENS in fields or ("config" in fields and "training.local_batch_size" not in fields)
    layers = _read_model(fields, draft, keys, config)
    _read_mesh(fields, draft, config, layers)
    _read_batches(fields, draft, config, is_new)
    _read_sharding(fields, draft, is_new)
    _read_recompute(fields, draft, config, layers)
    _read_rest(fields, draft, config)
    return draft.setup(TARGET.name, fields.finish(keys))


def _read_model(fields: Fields, draft: Draft, keys: Keys, config: Mapping[str, Any]) -> int | None:
    """Set the model, and return its number of blocks if it is known."""
    from atorch.auto.sources import shapes

    name, flavor = fields.data.get("model.name", "llama3"), fields.data.get("model.flavor")
    flavors = keys.facts["flavors"].get(str(name), {})
    model = config.get("model") or flavors.get(str(flavor))
    draft.fields["model"] = model
    note = f"the model {model}" if model else "a model that the catalogue has not: give its config.json"
    told: Kind = "used" if model else "assumed"
    fields.tell_given(told, note, "module", "config", "model.name", "model.flavor")
    facts = shapes.known(model) if model else None
    return None if facts is None else int(facts["layers"])


def _read_mesh(fields: Fields, draft: Draft, config: Mapping[str, Any], layers: int | None) -> None:
    keys = [f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline")]
    tensor, context, stages = map(fields.size, keys, (config.get("tensor", 1), 1, 1))
    fields.tell_used(draft.split("tensor", tensor, "tensor_parallel"), keys[0])
    if tensor > 1:
        fields.tell(keys[0], "assumed", f"tensor {tensor}, as the configuration has it")
    by_tokens = tensor > 1 and fields.flag("parallelism.enable_sequence_parallel") is not False
    if by_tokens:
        draft.add("sequence_parallel", mode="megatron")
    note = "sequence_parallel (megatron)" if by_tokens else "no sequence_parallel"
    fields.tell_used(note, "parallelism.enable_sequence_parallel")
    experts = draft.share_experts(fields.size("parallelism.expert_parallel_degree"))
    fields.tell_used(experts, "parallelism.expert_parallel_degree")
    balances = fields.data.get("parallelism.context_parallel_load_balancer", "headtail") not in (None, "None")
    settings: dict[str, Any] = {} if balances else {"load_balance": False}
    fields.tell_used(draft.split("context", context, "context_parallel", **settings), keys[1])
    note = f"context_parallel: {'' if balances else 'not '}balanced"
    fields.tell_used(note, "parallelism.context_parallel_load_balancer")
    word = str(fields.data.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    if word not in SCHEDULES and stages > 1 and is_known(word):
        raise fields.invalid("parallelism.pipeline_parallel_schedule", f"the planner knows {', '.join(SCHEDULES)}")
    schedule = SCHEDULES.get(word, "1f1b")
    per_stage = fields.whole("parallelism.pipeline_parallel_layers_per_stage")
    pieces = -(-layers // (stages * per_stage)) if per_stage and layers else 2
    settings = {} if schedule == "1f1b" else {"schedule": schedule}
    if schedule == "interleaved" and pieces > 2:
        settings["interleave"] = pieces
    fields.tell_used(draft.split("pipeline", stages, "pipeline_parallel", **settings), keys[2])
    told: tuple[Kind, str] = ("used", schedule)
    if stages == 1:
        told = ("no effect", "there is one stage")
    elif schedule == "zero_bubble":
        told = ("not expressed", f"{schedule}, with one piece of the model on a process")
    fields.tell_given(*told, "parallelism.pipeline_parallel_schedule")
    note = f"{pieces} pieces on a process"
    fields.tell_given("used" if layers else "assumed", note, "parallelism.pipeline_parallel_layers_per_stage")


def _read_batches(fields: Fields, draft: Draft, config: Mapping[str, Any], is_new: bool) -> None:
    stages = draft.axes.get("pipeline", 1)
    forms = ("training.local_batch_size", "training.global_batch_size", "training.seq_len"), (TOKENS, CONTEXT)
    old, new = (next((key for key in form if key in fields), None) for form in forms)
    if old and new:
        raise fields.invalid(old, f"{new} is given as well, which took its place; give one form")
    length = config.get("seq", 2048)
    if not is_new:
        local = fields.size("training.local_batch_size", config.get("tokens", 8 * length) // length)
        size = fields.size("parallelism.pipeline_parallel_microbatch_size") if stages > 1 else local
        if local % size:
            raise fields.invalid("training.local_batch_size", f"pipeline micro-batches of {size} do not divide it")
        total = fields.whole("training.global_batch_size", -1)
        if total is not None and total < 1:
            total = None
        draft.fields |= {"micro_batch": size, "accumulation": None if total else local // size}
        draft.fields |= {"global_batch": total, "seq": fields.size("training.seq_len", length)}
        for key in ("training.local_batch_size", "training.seq_len"):
            if key not in fields:
                note = "the default of the configuration, or torchtitan's 8 samples of 2,048 tokens"
                fields.tell(key, "assumed", note)
    else:
        seq, tokens = fields.size(CONTEXT, length), fields.size(TOKENS, config.get("tokens", 16384))
        if tokens % seq:
            fields.tell(TOKENS, "not expressed", f"{max(1, tokens // seq)} samples of {seq} tokens in the estimate")
        step, count = fields.whole("training.num_tokens_per_train_step", -1), fields.size(MICRO_BATCHES)
        total = max(1, step // seq) if step is not None and step > 0 else None
        draft.fields |= {"micro_batch": max(1, tokens // seq), "global_batch": total, "seq": seq}
        draft.fields["accumulation"] = None if total else count if stages > 1 else 1
    kind: Kind = "used" if stages > 1 else "no effect"
    fields.tell_given(kind, "micro-batches of a pipeline", MICRO_BATCHES)
    note = "samples of a micro-batch" if stages > 1 else "there is one stage"
    fields.tell_given(kind, note, "parallelism.pipeline_parallel_microbatch_size")


def _read_sharding(fields: Fields, draft: Draft, is_new: bool) -> None:
    axes, key = draft.axes, "parallelism.data_parallel_shard_degree"
    copies, shards = fields.size("parallelism.data_parallel_replicate_degree"), fields.whole(key, -1, -1)
    if not shards:
        raise fields.invalid(key, "it is -1 (the processes left) or at least 1")
    nodes, per_node = draft.fields["num_nodes"], draft.fields["devices_per_node"]
    rest = copies * axes.get("tensor", 1) * axes.get("context", 1) * axes.get("pipeline", 1)
    world = None if nodes is None or per_node is None else nodes * per_node
    told: Kind = "used"
    if shards < 0 and world is not None:
        if world % rest:
            why = f"{world} processes do not divide by the other degrees, which are {rest} together"
            raise fields.invalid(key, why)
        shards = world // rest
    elif shards < 0:
        told = "assumed"
    else:
        axes["data"] = copies * shards
    if copies > 1 and shards > 1:
        axes |= {"zero": shards, "data": copies}
    is_sharded = shards != 1 or axes.get("context", 1) > 1
    policy = fields.word("parallelism.fsdp_reshard_after_forward", ("default", "always", "never")) or "default"
    keeps = policy == "never" or (policy == "default" and axes.get("pipeline", 1) > 1)
    name = ("zero2" if keeps else "fsdp") if is_sharded else "ddp"
    if is_sharded:
        draft.add(name)
    draft.fields["reduces_each"] = is_sharded and axes.get("pipeline", 1) == 1
    left = "the processes that are left" if shards < 0 else str(shards)
    fields.tell(key, told, f"{name} over {left}" if is_sharded else "no shards")
    note = f"data {copies}: copies" if copies > 1 else "no copies"
    fields.tell_used(note, "parallelism.data_parallel_replicate_degree")
    note = f"{name}: gathered parameters are {'kept for backward' if keeps else 'freed after forward'}"
    fields.tell_given("used" if is_sharded else "no effect", note, "parallelism.fsdp_reshard_after_forward")
    if fields.flag("training.enable_cpu_offload") and is_sharded:
        draft.add("offload", parameters=1.0)
    on_host = "offload: parameters, gradients and states in host memory"
    fields.tell_used(on_host if draft.has("offload") else "nothing is offloaded", "training.enable_cpu_offload")
    _read_precision(fields, draft, is_sharded, is_new)


def _read_precision(fields: Fields, draft: Draft, is_sharded: bool, is_new: bool) -> None:
    words = ("bfloat16", "float32")
    dtype = fields.word("training.dtype", words) or "float32"
    products = fields.word("training.mixed_precision_param", words) or "bfloat16"
    is_split = not {"tensor", "pipeline"}.isdisjoint(draft.axes)
    note = "computed in the type of the weights"
    if dtype == "bfloat16":
        draft.knobs["dtype"] = "bf16"
    elif products == "bfloat16" and (is_sharded or is_new):
        draft.add("half", dtype="bf16")
        note = "half: parameters are cast to bf16 as they are gathered, and the optimizer steps fp32 shards"
    elif products == "bfloat16" and not is_split:
        draft.add("amp_native", dtype="bf16")
        note = "amp_native: products in bf16"
    elif products == "bfloat16":
        note = "fp32: torchtitan casts with FSDP, or without any split"
    fields.tell_setting("training.mixed_precision_param", note)
    is_narrow = dtype == "bfloat16"
    fields.tell_used("dtype bf16: no fp32 copies of weights" if is_narrow else "weights in fp32", "training.dtype")


def _read_recompute(fields: Fields, draft: Draft, config: Mapping[str, Any], layers: int | None) -> None:
    key, option = "activation_checkpoint.mode", fields.data.get("activation_checkpoint.selective_ac_option")
    mode = fields.word(key, MODES) or config.get("checkpoint", "selective")
    is_file = "config" not in fields
    every = str(option if option is not None else "2" if is_file else "op")
    told: Kind = "used" if key in fields else "assumed"
    note = "activations are kept"
    if mode == "full" or (mode == "selective" and every == "1"):
        draft.add("checkpoint")
        note = "checkpoint: blocks are recomputed"
    elif mode == "selective" and every.isdecimal() and layers and len(every) < 6 and int(every):
        draft.add("checkpoint", max_checkpoint_module_num=-(-layers // int(every)))
        note = f"checkpoint: every {every}th of {layers} blocks is recomputed"
    elif mode in ("selective", "memory_budget"):
        draft.add("checkpoint", selective=True)
        note = "checkpoint (selective): products and attention are kept; torchtitan recomputes every other product too"
        told = "not expressed" if mode == "memory_budget" or every != "op" else told
    fields.tell(key, told, note)
    kind: Kind = "used" if mode == "selective" else "no effect"
    fields.tell_given(kind, note, "activation_checkpoint.selective_ac_option")
    kind = "not expressed" if mode == "memory_budget" else "no effect"
    fields.tell_given(kind, note, "activation_checkpoint.memory_budget")


def _read_rest(fields: Fields, draft: Draft, config: Mapping[str, Any]) -> None:
    enabled = fields.flag("compile.enable")
    parts = fields.data.get("compile.components", ["model", "loss"])
    names = parts.split(",") if isinstance(parts, str) else parts if isinstance(parts, list) else []
    is_on = bool(config.get("compile")) if enabled is None else enabled
    if is_on and "model" in names:
        draft.add("compile")
    note = "compile: the blocks" if draft.has("compile") else "blocks are not compiled"
    fields.tell_used(note, "compile.enable", "compile.components")
    _read_float8(fields, draft, config)
    micro, seq = draft.fields["micro_batch"] or 1, draft.fields["seq"] or 1
    chunks = fields.whole("loss.num_chunks", 1, 8 if config else None)
    if chunks is not None and chunks > 1:
        draft.add("cross_entropy", **({} if chunks == 16 else {"chunk_tokens": max(1, micro * seq // chunks)}))
    if chunks is not None:
        note = f"cross_entropy: logits in {chunks} chunks" if chunks > 1 else "logits are held whole"
        fields.tell_setting("loss.num_chunks", note)
    name = str(fields.data.get("optimizer.name", "AdamW"))
    fields.tell_given("used" if name in ("AdamW", "Adam") else "not expressed", "optimizer adamw", "optimizer.name")
    if fields.data.get("optimizer.implementation") == "fused_opt_states_bf16":
        draft.knobs["optimizer"] = "adamw_bf16"
        fields.tell("optimizer.implementation", "used", "optimizer adamw_bf16: moments in bf16")
    fields.tell_given("no effect", "the same numbers by other kernels", "optimizer.implementation")


def _read_float8(fields: Fields, draft: Draft, config: Mapping[str, Any]) -> None:
    given = fields.data.get("model.converters", [])
    found = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else []
    named = [str(name).rpartition(".")[2] for name in found]
    is_on = "float8" in named or bool(config.get("fp8")) or bool(fields.flag("float8.enable_float8_linear"))
    note: tuple[Kind, str] = ("no effect", "float8 is not among model.converters")
    for section in ("quantize.linear.float8", "float8"):
        recipe = fields.data.get(f"{section}.recipe_name")
        if is_on and (recipe is not None or not draft.has("fp8")):
            scaling = "rowwise_gw_hp" if recipe == "rowwise_with_gw_hp" else recipe or "tensorwise"
            if scaling not in ("tensorwise", "rowwise", "rowwise_gw_hp"):
                raise fields.invalid(f"{section}.recipe_name", "it is tensorwise, rowwise or rowwise_with_gw_hp")
            more = {} if scaling == "tensorwise" else {"scaling": scaling}
            draft.add("fp8", backend="torchao", exclude=["output", "head"], **more)
        note = ("used", "fp8 (torchao): products of blocks in 8 bits") if is_on else note
        fields.tell_given(*note, *(key for key in fields.data if key.startswith(f"{section}.")))
    others = [name for name in named if name != "float8"]
    if others:
        fields.tell("model.converters", "not expressed", f"{note[1]}; no {others[0]} in the estimate")
    fields.tell_used(note[1], "model.converters")


TARGET = Target("torchtitan", "torchtitan", recognises, read, lacking, write, lambda setup: f"bash {NAME}")
