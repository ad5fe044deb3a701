"""Transformers' `TrainingArguments`, with what TRL's recipes add, and the commands that start trainers.

Names and defaults are those of transformers 5.23 (training_args.py) and trl (trainer/model_config.py, sft_config.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError
from atorch.trainer_configs.fsdp_settings import read_fsdp, read_parallelism
from atorch.trainer_configs.keys import TORCHRUN, Keys, read_launcher, read_optimizer, split_launch
from atorch.trainer_configs.setup import DTYPES, NARROW, Draft, Entry, Kind, Target, TrainingSetup, dtype_of
from atorch.trainer_configs.source import NOT_KNOWN, Fields, Source, options_of, values_of

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

NAME = "training_arguments.json"
TITLE = "TrainingArguments"
OPTIMIZERS: Mapping[str, tuple[str, Kind]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", "used")),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), ("adamw8bit", "used")),
    **dict.fromkeys(("lion", "lion_32bit"), ("lion", "used")),
    **{"adafactor": ("adafactor", "used"), "sgd": ("sgd", "not expressed")},
    **{"paged_adamw_8bit": ("adamw8bit", "not expressed"), "paged_lion_32bit": ("lion", "not expressed")},
}
WRITTEN: Mapping[str, str] = {"adamw8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "lion": "lion_32bit"}
ATTENTION: Mapping[str, str] = {
    **{"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash_attention_2"},
    **{"flash_attention_3": "flash_attention_2", "kernels-community/flash-attn2": "flash_attention_2"},
}
ADAPTERS = ("use_peft", "lora_r", "lora_rank", "lora_target_modules", "lora_target")


def recognises(source: Source) -> bool:
    is_named = any(word.startswith("--per_device_train_batch_size") for word in source.words)
    keys = source.data.keys() | arguments_file(source).keys()
    return is_named or not keys.isdisjoint(("per_device_train_batch_size", "per_gpu_train_batch_size"))


def read(source: Source) -> TrainingSetup:
    draft = Draft(traits=TARGET.traits)
    if source.words:
        return read_command(source, draft, TARGET.name)
    fields = Fields(source.name, source.data)
    entries = read_arguments(fields, draft, source)
    return draft.setup(TARGET.name, (*entries, Entry("precision", None, "used", draft.set_precision())))


def read_arguments(fields: Fields, draft: Draft, source: Source) -> tuple[Entry, ...]:
    """Add what the arguments mean, and return the entries."""
    _read_batches(fields, draft)
    for word in ("bf16", "fp16"):
        if fields.flag(word):
            draft.precision = word
        fields.tell_used(f"mixed precision in {word}" if fields.flag(word) else f"no {word}", word)
    if fields.flag("bf16") and fields.flag("fp16"):
        raise fields.invalid("fp16", "bf16 is true as well, and Transformers takes one of them")
    _read_model(fields, draft)
    _read_methods(fields, draft)
    if fields.data.get("fsdp") or fields.data.get("fsdp_config"):
        _read_fsdp(fields, draft, source)
        fields.tell_used("the blocks, which atorch finds by itself", "fsdp_transformer_layer_cls_to_wrap")
    if fields.data.get("deepspeed"):
        _read_deepspeed(fields, draft, source, "deepspeed", TITLE)
    return fields.finish(Keys.of(TARGET.name))


def _read_deepspeed(fields: Fields, draft: Draft, source: Source, key: str, filled_by: str) -> None:
    """DeepSpeed's configuration, which a key names or holds."""
    from atorch.trainer_configs import deepspeed

    named = fields.data[key]
    if named is True:
        fields.tell(key, "assumed", "the script says the rest: ddp, without 16-bit weights, in the estimate")
        return
    if not isinstance(named, (str, Mapping)):
        raise fields.invalid(key, "it is the path of a configuration, or the configuration")
    values = named if isinstance(named, Mapping) else values_of(source.beside(named))
    name = "deepspeed" if isinstance(named, Mapping) else named
    fields.tell(key, "used", "DeepSpeed's configuration; its keys follow")
    fields.extend(deepspeed.read_config(Fields(name, values, "deepspeed: "), draft, filled_by))


def _read_batches(fields: Fields, draft: Draft) -> None:
    key = "per_gpu_train_batch_size" if "per_gpu_train_batch_size" in fields else "per_device_train_batch_size"
    micro, count = fields.whole(key), fields.whole("gradient_accumulation_steps")
    default = "" if micro else "8, Transformers' default: "
    fields.tell_setting(key, f"{default}samples of a micro-batch")
    held, default = draft.fields.get("accumulation"), ""
    if count is None:
        default = "1, Transformers' default: " if held is None else f"{held}, as the launcher's configuration says: "
    elif held not in (None, count):
        raise fields.invalid(
            "gradient_accumulation_steps", f"the launcher's configuration says {held}; make them equal"
        )
    fields.tell_setting("gradient_accumulation_steps", f"{default}micro-batches of a step")
    draft.fields |= {"micro_batch": micro or 8, "accumulation": count or held or 1}
    for key in ("max_length", "max_seq_length", "model_max_length", "max_seq_len", "block_size", "cutoff_len"):
        if draft.fields.get("seq") is None and isinstance(fields.data.get(key), (int, str)):
            draft.fields["seq"] = fields.whole(key)
            fields.tell(key, "used", "tokens of a sample; shorter ones are reckoned as full")
        elif key in fields:
            fields.tell(key, "not expressed", "samples have another key's number of tokens in the estimate")
    if fields.flag("packing"):
        fields.tell("packing", "used", "samples are full")


def _read_model(fields: Fields, draft: Draft) -> None:
    for key in ("model_name_or_path", "model_id", "model_name"):
        if isinstance(fields.data.get(key), str):
            draft.fields["model"] = fields.data[key]
            fields.tell(key, "used", "the model")
    _read_adapters(fields, draft)
    attention = ATTENTION.get(fields.word("attn_implementation") or "")
    if attention is not None:
        fields.tell("attn_implementation", "used", f"attention {attention}")
        draft.knobs |= {"attention": attention} if attention != "sdpa" else {}
    for key in ("torch_dtype", "dtype", "model_dtype", "pure_bf16"):  # the last is LLaMA-Factory's, true or false
        given = fields.data.get(key)
        dtype = "bf16" if str(given) == "True" else dtype_of(given)
        draft.weights = dtype or draft.weights
        fields.tell_used(f"weights are loaded in {dtype or 'fp32'}; see precision", key)


def _read_adapters(fields: Fields, draft: Draft) -> None:
    """LoRA by peft's arguments, or LLaMA-Factory's: finetuning_type, lora_rank, lora_target, quantization_bit."""
    rank = fields.whole("lora_r") or fields.whole("lora_rank")
    is_4bit = bool(fields.flag("load_in_4bit")) or fields.whole("quantization_bit", 2) == 4
    tuning = fields.word("finetuning_type")
    has_adapters = fields.flag("use_peft") if tuning is None else tuning == "lora"
    if tuning in ("lora", "full"):
        fields.tell_used(f"{tuning}: see adapters", "finetuning_type")
    if has_adapters or (has_adapters is None and rank is not None):
        rank = rank or (16 if tuning is None else 8)
        targets = fields.data.get("lora_target_modules", fields.data.get("lora_target", "all-linear"))
        names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise fields.invalid("lora_target_modules", "it is names of modules")
        draft.knobs["lora"] = str(rank) if names in (["all-linear"], ["all"]) else f"{rank}:{','.join(names)}"
        draft.knobs |= {"qlora": True} if is_4bit else {}
        fields.tell_used(f"lora {draft.knobs['lora']}: adapters beside frozen weights", *ADAPTERS)
        note = "qlora: frozen weights in 4 bits" if is_4bit else "no qlora"
        fields.tell_used(note, "load_in_4bit", "quantization_bit")
    fields.tell_given("no effect", "no adapters are trained", *ADAPTERS, "load_in_4bit", "quantization_bit")


def _read_methods(fields: Fields, draft: Draft) -> None:
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if fields.flag(key):
            draft.add("checkpoint")
        fields.tell_used("checkpoint: blocks are recomputed" if fields.flag(key) else "activations are kept", key)
    if fields.flag("use_liger_kernel") or fields.flag("use_liger"):
        draft.add("cross_entropy")
    if fields.flag("torch_compile"):
        draft.add("compile")
    fields.tell_used("compile" if fields.flag("torch_compile") else "no compile", "torch_compile")
    read_optimizer(fields, "optim", OPTIMIZERS, draft)
    if isinstance(fields.data.get("accelerator_config"), Mapping):
        more = fields.within("accelerator_config").within("gradient_accumulation_kwargs")
        draft.fields |= {"reduces_each": True} if more.flag("sync_each_batch") else {}
    if isinstance(fields.data.get("parallelism_config"), Mapping):
        read_parallelism(fields.within("parallelism_config"), draft, "")


def _read_fsdp(fields: Fields, draft: Draft, source: Source) -> None:
    """The argument fsdp, also in its old form of words, and fsdp_config, as accelerate's with version 2 by default."""
    config = fields.data.get("fsdp_config")
    if isinstance(config, str):
        if config.lstrip().startswith("{"):
            raise fields.invalid("fsdp_config", "give it as a file's path, or in a file of arguments")
        config = values_of(source.beside(config))
    if config is not None and not isinstance(config, Mapping):
        raise fields.invalid("fsdp_config", "it is the path of a file, or keys and values")
    given = fields.data.get("fsdp")
    words = given if isinstance(given, list) else str(given or "").split()
    values: dict[str, Any] = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in (config or {}).items()}
    values.setdefault("fsdp_version", 2)
    values.setdefault("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if "fsdp_cpu_offload" in values:
        values["fsdp_offload_params"] = values.pop("fsdp_cpu_offload")
    for word in words:
        name = str(word).lower()
        if name == "offload":
            values["fsdp_offload_params"] = True
        elif name in ("hybrid_shard", "hybrid_shard_zero2", "full_shard", "shard_grad_op", "no_shard"):
            if str(values["fsdp_version"]) == "2":
                values.setdefault("fsdp_reshard_after_forward", name != "shard_grad_op")
                if name in ("hybrid_shard", "hybrid_shard_zero2", "no_shard"):
                    raise fields.invalid("fsdp", "Transformers has it with fsdp_config's version 1 alone; set that")
            values.setdefault("fsdp_sharding_strategy", name.upper())
        elif name not in ("auto_wrap", "true", "1", "false", "", "none"):
            raise fields.invalid("fsdp", "it is true, or of the words full_shard, shard_grad_op, auto_wrap, offload")
    draft.fields["loads_whole"] = str(values.get("fsdp_cpu_ram_efficient_loading", False)).lower() != "true"
    fields.tell("fsdp", "used", "FSDP; its settings follow" if given else "no FSDP")
    fields.tell_used("settings of FSDP, which follow", "fsdp_config")
    if given and str(given).lower() not in ("false", "none"):
        read_fsdp(fields.also(values, "fsdp_config."), draft)


def read_command(source: Source, draft: Draft, tool: str, first: Sequence[Entry] = ()) -> TrainingSetup:
    """The setup of `torchrun … train.py --arguments`, `deepspeed train.py …`, `python train.py …`.

    Raises:
        ArgumentError: a value is invalid, or the command starts no script.
    """
    launcher, script, words = split_launch(source.words)
    if not script:
        raise ArgumentError(f"{shlex.join(source.words)[:120]} starts no script: there is no word that ends in .py")
    told = first
    if not first:
        told = tuple(entry for entry in read_launcher(launcher, {}, draft) if entry.key != "-m")
    given = {name.lstrip("-").replace("-", "_"): value for name, value in options_of(words)[0].items()}
    fields = Fields(source.name, {**arguments_file(source), **given}, "--")
    if len(fields.data) > len(given):
        fields.tell_used("arguments of the script, which its options override", "config")
    # DeepSpeed adds the argument deepspeed_config to any script, with --deepspeed
    is_own = "deepspeed_config" in fields or (tool != TARGET.name and Keys.of(TARGET.name).read.isdisjoint(fields.data))
    if "deepspeed_config" in fields:
        _read_deepspeed(fields, draft, source, "deepspeed_config", "")
        fields.tell_used("on", "deepspeed")
    entries = fields.finish() if is_own else read_arguments(fields, draft, source)
    own = "an argument of the script itself, which may change anything"
    entries = tuple(
        replace(entry, note=own) if entry.kind == "unknown" and (is_own or entry.note == NOT_KNOWN) else entry
        for entry in entries
    )
    return draft.setup(tool, (*told, *entries, Entry("precision", None, "used", draft.set_precision())))


def arguments_file(source: Source) -> dict[str, Any]:
    """The arguments in the file that a script is given by `--config`, as TRL's are, or by its path alone.

    Raises:
        ArgumentError: the file is not valid.
    """
    options, rest = options_of(split_launch(source.words)[2])
    for named in (options.get("--config"), *rest):
        if isinstance(named, str) and named.endswith((".json", ".yaml", ".yml")) and source.beside(named).is_file():
            values = values_of(source.beside(named))
            return {} if Keys.of(TARGET.name).read.isdisjoint(values) else values
    return {}


def arguments_of(setup: TrainingSetup, **more: Any) -> dict[str, Any]:
    """The arguments of a setup: batches, precision, recomputation, and `more`."""
    micro, count, _ = setup.batches(setup.world_size or 1)
    methods = {item if isinstance(item, str) else item[0]: item for item in setup.methods}
    precision = next((methods[name][1].get("dtype") for name in ("half", "amp_native") if name in methods), None)
    found: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": count,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "gradient_checkpointing": "checkpoint" in methods,
    }
    if setup.model is not None:
        found["model_name_or_path"] = setup.model
    if setup.seq is not None:
        found["max_length"] = setup.seq
    if "cross_entropy" in methods:
        found["use_liger_kernel"] = True
    if setup.knobs.get("optimizer") in WRITTEN:
        found["optim"] = WRITTEN[setup.knobs["optimizer"]]
    if setup.knobs.get("attention") not in (None, "sdpa"):
        found["attn_implementation"] = setup.knobs["attention"]
    if setup.knobs.get("dtype") in ("bf16", "fp16"):
        found["dtype"] = DTYPES[setup.knobs["dtype"]]
    if setup.knobs.get("lora") or setup.knobs.get("qlora"):
        rank, _, targets = str(setup.knobs.get("lora") or 16).partition(":")
        found |= {"use_peft": True, "lora_r": int(rank)}
        found["lora_target_modules"] = targets.split(",") if targets else "all-linear"
        found |= {"load_in_4bit": True} if setup.knobs.get("qlora") else {}
    return found | more


def text_of(setup: TrainingSetup, **more: Any) -> str:
    """The arguments as JSON, which `HfArgumentParser.parse_json_file` reads."""
    return json.dumps(arguments_of(setup, **more), indent=2) + "\n"


def flags_of(setup: TrainingSetup, **more: Any) -> str:
    words = []
    for name, value in arguments_of(setup, **more).items():
        listed = value if isinstance(value, list) else [value]
        words.append(f"--{name} {' '.join(shlex.quote(str(item)) for item in listed)}")
    return " ".join(words)


def lacking(strategy: Strategy) -> Iterator[str]:
    from atorch.trainer_configs import accelerate

    axes = [axis for method in strategy for axis, _ in getattr(method, "slices", ()) if axis != "data"]
    if axes:
        yield f"{', '.join(axes)}: TrainingArguments as a file have no mesh; Accelerate's file has"
    if "fp8" in strategy.names():
        yield "fp8: TrainingArguments have none; Accelerate's file has"
    yield from accelerate.lacking(strategy)


def write(setup: TrainingSetup) -> dict[str, str]:
    more = {"torch_compile": True} if "compile" in setup.methods else {}
    return {NAME: text_of(setup, **_fsdp_of(setup), **more)}


def _fsdp_of(setup: TrainingSetup) -> dict[str, Any]:
    from atorch.trainer_configs import accelerate

    found = accelerate.fsdp_of(setup)
    keys = {"fsdp_version": "version", "fsdp_offload_params": "cpu_offload"}
    config = {keys.get(key, key.removeprefix("fsdp_")): value for key, value in found.items()}
    return {"fsdp": True, "fsdp_config": config, "gradient_checkpointing": False} if config else {}


def command(setup: TrainingSetup) -> str:
    return f"{TORCHRUN} train.py {NAME}"


TARGET = Target("transformers", "Transformers' TrainingArguments", recognises, read, lacking, write, command, NARROW)
