"""Transformers' `TrainingArguments`, with what TRL's recipes add, and the commands that start trainers.

Names and defaults are those of transformers 5.23 (training_args.py) and trl (trainer/model_config.py, sft_config.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atorch.errors import ArgumentError
from atorch.trainer_configs.fsdp_settings import read_fsdp, read_parallelism
from atorch.trainer_configs.setup import IRRELEVANT, NARROW, Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.source import Fields, Source, options_of, values_of
from atorch.trainer_configs.transformers_keys import ADAPTERS, ATTENTION, EXACT, KNOWN, NO_EFFECT, OPTIMIZERS, WRITTEN

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

NAME = "training_arguments.json"
TITLE = "TrainingArguments"


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
        fields.tell_all({word: ("used", f"mixed precision in {word}" if fields.flag(word) else f"no {word}")})
    if fields.flag("bf16") and fields.flag("fp16"):
        raise fields.invalid("fp16", "bf16 is true as well, and Transformers takes one of them")
    _read_model(fields, draft)
    _read_methods(fields, draft)
    if fields.data.get("fsdp") or fields.data.get("fsdp_config"):
        _read_fsdp(fields, draft, source)
        key = "fsdp_transformer_layer_cls_to_wrap"  # an argument of its own before transformers 5
        fields.tell_all({key: ("used", "the blocks, which atorch finds by itself")})
    if fields.data.get("deepspeed"):
        _read_deepspeed(fields, draft, source, "deepspeed", TITLE)
    fields.tell_all(dict.fromkeys(NO_EFFECT.split(), IRRELEVANT))
    return fields.finish((*KNOWN, *NO_EFFECT.split()))


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
    old = "per_gpu_train_batch_size" in fields
    micro = fields.whole("per_gpu_train_batch_size" if old else "per_device_train_batch_size", 1)
    count = fields.whole("gradient_accumulation_steps", 1)
    told: Kind = "assumed" if micro is None else "used"
    default = "" if micro else "8, Transformers' default: "
    fields.tell(
        "per_gpu_train_batch_size" if old else "per_device_train_batch_size", told, f"{default}samples of a micro-batch"
    )
    held = draft.fields.get("accumulation")
    default = "1, Transformers' default: " if held is None else f"{held}, as the launcher's configuration says: "
    told, default = ("assumed", default) if count is None else ("used", "")
    fields.tell("gradient_accumulation_steps", told, f"{default}micro-batches of a step")
    if count is not None and held not in (None, count):
        raise fields.invalid(
            "gradient_accumulation_steps", f"the launcher's configuration says {held}; make them equal"
        )
    draft.fields |= {"micro_batch": micro or 8, "accumulation": count or held or 1}
    for key in ("max_length", "max_seq_length", "model_max_length", "max_seq_len", "block_size", "cutoff_len"):
        if draft.fields.get("seq") is None and isinstance(fields.data.get(key), (int, str)):
            draft.fields["seq"] = fields.whole(key, 1)
            fields.tell(key, "used", "tokens of a sample; shorter ones are reckoned as full")
        elif fields.data.get(key) is not None:
            fields.tell(key, "not expressed", "samples have another key's number of tokens in the estimate")
    if fields.flag("packing"):
        fields.tell("packing", "used", "samples are full")
    fields.tell_all({"packing": ("not expressed", "every sample has its full length in the estimate")})


def _read_model(fields: Fields, draft: Draft) -> None:
    knobs = draft.fields["knobs"]
    for key in ("model_name_or_path", "model_id", "model_name"):
        if isinstance(fields.data.get(key), str):
            draft.fields["model"] = fields.data[key]
            fields.tell(key, "used", "the model")
    rank, is_4bit = fields.whole("lora_r", 1) or fields.whole("lora_rank", 1), bool(fields.flag("load_in_4bit"))
    is_4bit = is_4bit or fields.whole("quantization_bit", 2) == 4
    tuning = fields.word("finetuning_type")  # this, lora_target and quantization_bit are LLaMA-Factory's
    has_adapters = fields.flag("use_peft") if tuning is None else tuning == "lora"
    note = "frozen layers, if any, are trained as well" if tuning not in ("lora", "full") else f"{tuning}: see adapters"
    fields.tell_all({"finetuning_type": ("used" if tuning in ("lora", "full") else "not expressed", note)})
    if has_adapters or (has_adapters is None and rank is not None):
        rank = rank or (16 if tuning is None else 8)
        targets = fields.data.get("lora_target_modules", fields.data.get("lora_target", "all-linear"))
        names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets
        names = ["all-linear"] if names == ["all"] else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise fields.invalid("lora_target_modules", "it is names of modules")
        knobs["lora"] = str(rank) if names == ["all-linear"] else f"{rank}:{','.join(names)}"
        knobs |= {"qlora": True} if is_4bit else {}
        fields.tell_all(dict.fromkeys(ADAPTERS, ("used", f"lora {knobs['lora']}: adapters beside frozen weights")))
        note = "qlora: frozen weights in 4 bits" if is_4bit else "no qlora"
        fields.tell_all(dict.fromkeys(("load_in_4bit", "quantization_bit"), ("used", note)))
    idle: tuple[Kind, str] = ("no effect", "no adapters are trained")
    fields.tell_all(dict.fromkeys((*ADAPTERS, "load_in_4bit", "quantization_bit"), idle))
    for key in ("lora_alpha", "lora_task_type", "use_rslora", "use_dora", "lora_modules_to_save", "load_in_8bit"):
        kind: Kind = "no effect" if key in ("lora_alpha", "lora_task_type", "use_rslora") else "not expressed"
        fields.tell_all({key: (kind, "the estimate is without it")})
    attention = ATTENTION.get(fields.word("attn_implementation") or "")
    if attention is not None:
        fields.tell("attn_implementation", "used", f"attention {attention}")
        knobs |= {"attention": attention} if attention != "sdpa" else {}
    fields.tell_all({"attn_implementation": ("not expressed", "attention that keeps no scores in the estimate")})
    for key in ("torch_dtype", "dtype", "model_dtype", "pure_bf16"):  # the last is LLaMA-Factory's, true or false
        word = str(fields.data.get(key)).removeprefix("torch.")
        dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "True": "bf16"}.get(word)
        draft.weights = dtype or draft.weights
        fields.tell_all({key: ("used", f"weights are loaded in {dtype or 'fp32'}; see precision")})


def _read_methods(fields: Fields, draft: Draft) -> None:
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if fields.flag(key):
            draft.add("checkpoint")
        note = "checkpoint: blocks are recomputed" if fields.flag(key) else "activations are kept"
        fields.tell_all({key: ("used", note), f"{key}_kwargs": IRRELEVANT})
    if fields.flag("use_liger_kernel") or fields.flag("use_liger"):
        draft.add("cross_entropy")
    note = "cross_entropy: the loss by chunks of tokens; Liger's other kernels are not in the estimate"
    fields.tell_all(
        dict.fromkeys(("use_liger_kernel", "use_liger"), ("used", note)) | {"liger_kernel_config": IRRELEVANT}
    )
    if fields.flag("torch_compile"):
        draft.add("compile")
    fields.tell_all({
        "torch_compile": ("used", "compile" if fields.flag("torch_compile") else "no compile"),
        **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), IRRELEVANT),
        **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
                         "ddp_broadcast_buffers"), ("not expressed", "ddp has its defaults in the estimate")),
    })  # fmt: skip
    kind = fields.word("optim")
    if kind is not None:
        name = OPTIMIZERS.get(kind)
        exact: Kind = "used" if kind in EXACT else "not expressed"
        fields.tell("optim", exact, f"optimizer {name or 'adamw'}{'' if exact == 'used' else ' in the estimate'}")
        draft.fields["knobs"] |= {"optimizer": name} if name not in (None, "adamw") else {}
    config = fields.within("accelerator_config") if isinstance(fields.data.get("accelerator_config"), Mapping) else None
    if config is not None:
        more = config.within("gradient_accumulation_kwargs")
        if more.flag("sync_each_batch"):
            draft.fields["reduces_each"] = True
        more.tell_all(
            {"sync_each_batch": ("used", "micro_batch: gradients are reduced with each"), "num_steps": IRRELEVANT}
        )
        config.tell_all(dict.fromkeys(config.data, IRRELEVANT))
    parallel = fields.data.get("parallelism_config")
    if isinstance(parallel, Mapping):
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
    fields.tell("fsdp", "used", "FSDP; its settings follow" if given else "no FSDP")
    fields.tell_all({"fsdp_config": ("used", "settings of FSDP, which follow")})
    if given and str(given).lower() not in ("false", "none"):
        read_fsdp(fields.also(values, "fsdp_config."), draft)


def read_command(source: Source, draft: Draft, tool: str, first: Sequence[Entry] = ()) -> TrainingSetup:
    """The setup of `torchrun … train.py --arguments`, `deepspeed train.py …`, `python train.py …`.

    Raises:
        ArgumentError: a value is invalid, or the command starts no script.
    """
    launcher, script = split_command(source.words)
    told = first
    if not first:
        draft.fields["num_nodes"], draft.fields["devices_per_node"] = _processes(Fields(source.name, launcher))
        told = tuple(_told_launcher(launcher))
    given = {name.lstrip("-").replace("-", "_"): value for name, value in script.items()}
    fields = Fields(source.name, {**arguments_file(source), **given}, "--")
    if len(fields.data) > len(given):
        fields.tell_all({"config": ("used", "arguments of the script, which its options override")})
    is_own = "deepspeed_config" in fields  # the argument that DeepSpeed adds to any script, with --deepspeed
    if not is_own and (tool == TARGET.name or not set(KNOWN).isdisjoint(fields.data)):
        told = (*told, *read_arguments(fields, draft, source))
    else:
        if is_own:
            _read_deepspeed(fields, draft, source, "deepspeed_config", "")
            fields.tell_all({"deepspeed": ("used", "on")})
        told = (*told, *(replace(entry, note=OWN) if entry.kind == "unknown" else entry for entry in fields.finish()))
    told = tuple(replace(entry, note=OWN) if entry.note == "there is no such key" else entry for entry in told)
    return draft.setup(tool, (*told, Entry("precision", None, "used", draft.set_precision())))


def arguments_file(source: Source) -> dict[str, Any]:
    """The arguments in the file that a script is given by `--config`, as TRL's are, or by its path alone.

    Raises:
        ArgumentError: the file is not valid.
    """
    start = next((index for index, word in enumerate(source.words) if word.endswith(".py")), None)
    options, rest = options_of(source.words[start + 1 :]) if start is not None else ({}, ())
    for named in (options.get("--config"), *rest):
        if isinstance(named, str) and named.endswith((".json", ".yaml", ".yml")) and source.beside(named).is_file():
            values = values_of(source.beside(named))
            return values if set(KNOWN) & set(values) else {}
    return {}


OWN = "an argument of the script itself, which may change anything"
FLAGS = ("--standalone", "--no_local_rank", "--no-python", "--module", "-m", "--no_ssh", "--master_port")
NODES = ("--nnodes", "--num_nodes", "--num_machines")
PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--num_gpus")


def split_command(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a launcher, before the script, and those of the script.

    Raises:
        ArgumentError: there is no script.
    """
    start = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if start is None and "-m" in words[:-1]:
        start = max(index for index, word in enumerate(words[:-1]) if word == "-m") + 1
    if start is None:
        raise ArgumentError(f"{shlex.join(words)[:120]} starts no script: there is no word that ends in .py")
    return options_of(words[:start], FLAGS)[0], options_of(words[start + 1 :])[0]


def _processes(fields: Fields) -> tuple[int | None, int | None]:
    """Nodes and processes of a node; variables and ranges are unknown."""
    found = []
    for names in (NODES, PER_NODE):
        values = [str(fields.data[name]) for name in names if name in fields.data]
        found.append(next((int(value) for value in values if re.fullmatch(r"\d{1,6}", value) and int(value)), None))
    nodes, per_node = found
    return (nodes or 1 if per_node else nodes), per_node


def _told_launcher(options: Mapping[str, Any]) -> Iterator[Entry]:
    for name, value in options.items():
        if name in NODES or name in PER_NODE:
            told: Kind = "used" if str(value).isdecimal() else "assumed"
            yield Entry(name, value, told, "processes" if told == "used" else "a variable: give --cluster")
        elif name != "-m":
            yield Entry(name, value, "no effect", "for starting processes alone")


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
        found["dtype"] = {"bf16": "bfloat16", "fp16": "float16"}[setup.knobs["dtype"]]
    if setup.knobs.get("lora") or setup.knobs.get("qlora"):
        rank, _, targets = str(setup.knobs.get("lora") or 16).partition(":")
        found |= {
            "use_peft": True,
            "lora_r": int(rank),
            "lora_target_modules": targets.split(",") if targets else "all-linear",
        }
        found |= {"load_in_4bit": True} if setup.knobs.get("qlora") else {}
    return found | more


def text_of(setup: TrainingSetup, **more: Any) -> str:
    """The arguments as JSON, which `HfArgumentParser.parse_json_file` reads."""
    return json.dumps(arguments_of(setup, **more), indent=2) + "\n"


def flags_of(setup: TrainingSetup, **more: Any) -> str:
    """The arguments as flags of a command."""
    words = []
    for name, value in arguments_of(setup, **more).items():
        listed = value if isinstance(value, list) else [value]
        words.append(f"--{name} {' '.join(shlex.quote(str(item)) for item in listed)}")
    return " ".join(words)


def torchrun(setup: TrainingSetup, **more: Any) -> str:
    """See `Target.command`."""
    return (
        "torchrun --nnodes $NNODES --node-rank $NODE_RANK --nproc-per-node $GPUS --master-addr $MASTER_ADDR "
        f"--master-port $MASTER_PORT train.py {flags_of(setup, **more)}"
    )


def lacks(strategy: Strategy) -> tuple[str, ...]:
    """See `Target.lacks`."""
    from atorch.trainer_configs import accelerate

    axes = [axis for method in strategy for axis, _ in getattr(method, "slices", ()) if axis != "data"]
    why = [f"{', '.join(axes)}: TrainingArguments as a file have no mesh; Accelerate's file has"] if axes else []
    why += ["fp8: TrainingArguments have none; Accelerate's file has"] if "fp8" in strategy.names() else []
    return (*why, *accelerate.lacks(strategy))


def write(setup: TrainingSetup) -> dict[str, str]:
    """See `Target.write`."""
    more = {"torch_compile": True} if "compile" in setup.methods else {}
    return {NAME: text_of(setup, **_fsdp_of(setup), **more)}


def _fsdp_of(setup: TrainingSetup) -> dict[str, Any]:
    from atorch.trainer_configs import accelerate

    found = accelerate.fsdp_of(setup)
    keys = {"fsdp_version": "version", "fsdp_offload_params": "cpu_offload"}
    config = {keys.get(key, key.removeprefix("fsdp_")): value for key, value in found.items()}
    return {"fsdp": True, "fsdp_config": config, "gradient_checkpointing": False} if config else {}


def command(setup: TrainingSetup) -> str:
    """See `Target.command`."""
    return torchrun(setup).partition("train.py")[0] + f"train.py {NAME}"


TARGET = Target(
    name="transformers",
    title="Transformers' TrainingArguments",
    recognises=lambda source: bool(
        {"per_device_train_batch_size", "per_gpu_train_batch_size"} & set(source.data)
        or any(word.startswith("--per_device_train_batch_size") for word in source.words)
        or "per_device_train_batch_size" in arguments_file(source)
    ),
    read=read,
    lacks=lacks,
    write=write,
    command=command,
    traits=NARROW,
)
