"""Accelerate's configuration (YAML or JSON) and `accelerate launch`, as accelerate 1.15 reads them.

Its launcher (commands/launch.py, utils/launch.py) turns keys into environment variables, which the plugins of
utils/dataclasses.py read. A key that no plugin reads has no effect there, and is told so here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atorch.trainer_configs import deepspeed, transformers
from atorch.trainer_configs.deepspeed import STAGES
from atorch.trainer_configs.fsdp_settings import PARALLEL, read_fsdp, read_parallelism
from atorch.trainer_configs.keys import Keys, split_launch
from atorch.trainer_configs.megatron.flags import TRAITS
from atorch.trainer_configs.setup import NARROW, Draft, Entry, Kind, Target, TrainingSetup, lacking_methods
from atorch.trainer_configs.source import Fields, Source, options_of, values_of, yaml_text

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

NAME = "accelerate.yaml"
TYPES = ("NO", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_CPU", "DEEPSPEED", "FSDP", "MEGATRON_LM")
SECTIONS: Mapping[str, str | None] = {
    **{"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"},
    **dict.fromkeys(("parallelism_config", "fp8_config", "dynamo_config")),
}
"""Sections with the distributed type that reads them; None: any."""


def recognises(source: Source) -> bool:
    keys = ("distributed_type", "fsdp_config", "deepspeed_config", "compute_environment")
    is_own = any(key in source.data for key in keys) and "per_device_train_batch_size" not in source.data
    return is_own or {"accelerate", "launch"} <= set(source.words)


def read(source: Source) -> TrainingSetup:
    draft = Draft(traits=TARGET.traits)
    if not source.words:
        fields = Fields(source.name, source.data)
        entries = read_config(fields, draft, source)
        return draft.setup(TARGET.name, (*entries, Entry("precision", None, "used", draft.set_precision())))
    values = _values_of_options(options_of(split_launch(source.words)[0])[0], source)
    first = read_config(Fields(source.name, values), draft, source, is_launched=True)
    return transformers.read_command(source, draft, TARGET.name, first)


def _values_of_options(options: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The configuration that the options of `accelerate launch` and its file amount to."""
    values: dict[str, Any] = {}
    named = options.get("--config_file", options.get("--config-file"))
    if named is not None:
        values = values_of(source.beside(str(named)))
    prefixes = {section.removesuffix("config"): section for section in SECTIONS}
    prefixes |= dict.fromkeys(("zero_stage", "offload_", "zero3_", "gradient_"), "deepspeed_config")
    for option, value in options.items():
        key = option.lstrip("-").replace("-", "_")
        if key in ("use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu"):
            values["distributed_type"] = key.removeprefix("use_").upper()
            continue
        section = next((name for prefix, name in prefixes.items() if key.startswith(prefix)), None)
        if section is None:
            values[key] = value
        elif isinstance(values.setdefault(section, {}), dict):
            values[section][key] = value
    values.setdefault("distributed_type", "MULTI_GPU")
    values.pop("m", None)
    return values


def read_config(fields: Fields, draft: Draft, source: Source, is_launched: bool = False) -> tuple[Entry, ...]:
    """Add what the values of a file mean, and return the entries."""
    kind = _type_of(fields)
    _read_processes(fields, draft, kind, is_launched)
    _read_precision(fields, draft)
    if kind == "FSDP":
        read_fsdp(fields.within("fsdp_config"), draft)
        draft.fields["loads_whole"] = fields.within("fsdp_config").flag("fsdp_cpu_ram_efficient_loading") is False
    elif kind == "DEEPSPEED":
        section = fields.within("deepspeed_config")
        _read_deepspeed(section, draft, source)
        draft.fields["loads_whole"] = draft.has("fsdp") and section.flag("zero3_init_flag") is False
    elif kind == "MEGATRON_LM":
        _read_megatron(fields.within("megatron_lm_config"), draft)
    if fields.data.get("parallelism_config"):
        read_parallelism(fields.within("parallelism_config"), draft)
    fields.within("dynamo_config").prefix_keys("dynamo_")
    for found in (fields, fields.within("dynamo_config")):
        _read_dynamo(found, draft)
    _read_fp8(fields.within("fp8_config"), draft)
    for key, reader in SECTIONS.items():
        section = fields.within(key)
        if reader not in (None, kind):
            section.tell_given("no effect", f"distributed_type is {kind}", *section.data)
    return fields.finish(Keys.of(TARGET.name))


def _type_of(fields: Fields) -> str:
    kind: Any = fields.data.get("distributed_type", "NO" if "num_processes" not in fields else "MULTI_GPU")
    if kind in ("TPU", "XLA"):
        raise fields.invalid("distributed_type", "plans are for GPUs and CPUs, and there is no TPU among them")
    if kind is False:
        kind = "NO"  # YAML reads an unquoted NO as false
    kind = kind.upper() if isinstance(kind, str) else kind
    if kind not in TYPES:
        raise fields.invalid("distributed_type", f"it is one of {', '.join(TYPES)}")
    fields.tell("distributed_type", "used" if "distributed_type" in fields.data else "assumed", kind)
    return str(kind)


def _read_processes(fields: Fields, draft: Draft, kind: str, is_launched: bool) -> None:
    nodes, world = fields.whole("num_machines"), fields.whole("num_processes", -1)
    if kind == "NO":
        nodes, world = 1, 1
        note = "one process is started: distributed_type is NO"
        fields.tell_given("no effect", note, "num_processes", "num_machines")
    if world is not None and world < 1:
        fields.tell("num_processes", "assumed", "it is given when the job is launched: give --cluster")
        world = None
    if world is not None and world % (nodes or 1):
        raise fields.invalid("num_processes", f"{nodes} machines (num_machines) have not equally many of them")
    if world is not None:
        draft.fields |= {"num_nodes": nodes or 1, "devices_per_node": world // (nodes or 1)}
    elif nodes is not None and not is_launched:
        draft.fields["num_nodes"] = nodes


def _read_precision(fields: Fields, draft: Draft) -> None:
    """The word of mixed_precision; YAML reads an unquoted no as false."""
    value = fields.data.get("mixed_precision")
    word = "no" if value is None else value
    if value is False:
        word = "no"
        note = "no: an unquoted no is false in YAML, which Accelerate stumbles on; quote it"
        fields.tell("mixed_precision", "assumed", note)
    if "mixed_precision" not in fields and fields.flag("fp16"):
        word = "fp16"
    if not isinstance(word, str) or word.lower() not in ("no", "fp16", "bf16", "fp8"):
        raise fields.invalid("mixed_precision", "it is no, fp16, bf16 or fp8")
    draft.precision = None if word.lower() == "no" else word.lower()
    fields.tell_used("products in 16 bits" if draft.precision else "no 16-bit numbers", "mixed_precision")


def _read_deepspeed(fields: Fields, draft: Draft, source: Source) -> None:
    """A file of DeepSpeed's, or the keys of `DeepSpeedPlugin`."""
    named = fields.word("deepspeed_config_file")
    if named is not None and named.lower() != "none":
        values = values_of(source.beside(named))
        fields.tell("deepspeed_config_file", "used", "DeepSpeed's configuration, whose keys follow")
        keys = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "zero3_save_16bit_model")
        both = [key for key in (*keys, "offload_optimizer_device", "offload_param_device") if key in fields.data]
        if both:
            raise fields.invalid(both[0], "Accelerate refuses it beside deepspeed_config_file; leave one of them out")
        more = deepspeed.read_config(Fields(named, values), draft, "Accelerate")
        fields.extend(more)
    else:
        _read_plugin(fields, draft)


def _read_plugin(fields: Fields, draft: Draft) -> None:
    """The keys of `DeepSpeedPlugin`, as the configuration of DeepSpeed that it makes of them."""
    keys = {"offload_optimizer_device": "optimizer", "offload_param_device": "parameters"}
    devices = {key: fields.word(key) or "none" for key in keys}
    stage = fields.whole("zero_stage", 0, 2)
    zero = {"stage": stage} | {key.removesuffix("_device"): {"device": device} for key, device in devices.items()}
    config: dict[str, Any] = {"train_batch_size": "auto", "zero_optimization": zero}
    if draft.precision in ("bf16", "fp16", "fp8"):
        config["fp16" if draft.precision == "fp16" else "bf16"] = {"enabled": True}
    draft.fields["accumulation"] = fields.whole("gradient_accumulation_steps")
    deepspeed.read_config(Fields(fields.source, config), draft)
    default = "" if "zero_stage" in fields else "2, Accelerate's default: "
    fields.tell_setting("zero_stage", default + STAGES[stage or 0][1])
    held = draft.config("offload") or {}
    for key, kept in keys.items():
        if devices[key] != "none":
            is_host = devices[key] == "cpu"
            note = f"offload: {kept} in host memory" if kept in held else f"stage {stage} keeps them on devices"
            kind: Kind = "no effect" if kept not in held else "used" if is_host else "not expressed"
            fields.tell(key, kind, note if is_host else f"{note}; atorch has no NVMe")


def _read_megatron(fields: Fields, draft: Draft) -> None:
    axes = {"tp_degree": "tensor", "pp_degree": "pipeline", "context_parallel_size": "context"}
    for key, axis in axes.items():
        draft.split(axis, fields.whole(f"megatron_lm_{key}"), f"{axis}_parallel")
    if fields.flag("megatron_lm_sequence_parallelism") and draft.has("tensor_parallel"):
        draft.add("sequence_parallel", mode="megatron")
    if fields.flag("megatron_lm_use_distributed_optimizer"):
        draft.add("zero1")
    if fields.data.get("megatron_lm_recompute_granularity") == "full":
        draft.add("checkpoint")
    if draft.precision:
        draft.add("half", dtype="fp16" if draft.precision == "fp16" else "bf16")
    draft.fields["traits"] = TRAITS
    draft.fields["accumulation"] = fields.whole("megatron_lm_num_micro_batches")


def _read_dynamo(fields: Fields, draft: Draft) -> None:
    backend = str(fields.data.get("dynamo_backend") or "no").lower()
    if backend not in ("no", "false"):
        draft.add("compile", **({} if backend == "inductor" else {"backend": backend}))
    fields.tell_used("no compile" if backend in ("no", "false") else "compile", "dynamo_backend")


def _read_fp8(fields: Fields, draft: Draft) -> None:
    fields.prefix_keys("fp8_")
    if draft.precision != "fp8":
        fields.tell_given("no effect", "mixed_precision is not fp8", *fields.data)
        return
    word = str(fields.data.get("fp8_backend") or "TE").upper()
    if word not in ("TE", "AO", "MSAMP"):
        raise fields.invalid("fp8_backend", "it is TE, AO or MSAMP")
    known: Kind = "used" if word != "MSAMP" else "not expressed"
    draft.add("fp8", exclude=["head"])
    told: Kind = known if "fp8_backend" in fields else "assumed"
    fields.tell("fp8_backend", told, f"{word}: fp8 in linear layers, but for the head")


ABSENT: Mapping[str, str] = {
    "chunk": "Accelerate offloads whole kinds of state, without a budget",
    "pipeline_parallel": "Accelerate has stages under Megatron-LM alone",
    "zero1": "Accelerate has it under DeepSpeed: --export deepspeed",
    "module_replace": "Accelerate's file replaces no modules",
}
KNOBS: Mapping[str, tuple[str, ...]] = {
    **{"half": ("dtype",), "amp_native": ("dtype",), "micro_batch": ("size", "count"), "fp8": ("include", "exclude")},
    **{"parallel_mode": ("slices",), "offload": ("parameters",), "checkpoint": ("offload_to_cpu",)},
}
"""Knobs by method that a file of Accelerate can express."""


def lacking(strategy: Strategy) -> Iterator[str]:
    names = strategy.names()
    yield from lacking_methods(strategy, ABSENT, KNOBS)
    for method in strategy:
        if method.name == "offload" and getattr(method, "parameters", 0) != 1:
            yield f"{method}: FSDP offloads parameters with their states, all of them"
    sizes = {axis: size for method in strategy for axis, size in getattr(method, "slices", ())}
    is_fsdp = not {"fsdp", "zero2"}.isdisjoint(names)
    is_ddp = "ddp" in names  # a part of a strategy, without either, may get one of them later
    if "offload" in names and is_ddp:
        yield "offload without FSDP: Accelerate offloads what FSDP shards"
    if any(sizes.get(axis, 1) > 1 for axis in ("tensor", "context")) and is_ddp:
        yield "tensors or context without FSDP: Accelerate has them with FSDP"
    if sizes.get("sequence", 1) > 1 or "sequence_parallel" in names:
        yield "sequence_parallel: Accelerate has it under DeepSpeed: --export deepspeed"
    if "half" in names and is_ddp:
        yield "half without FSDP: Accelerate has 16-bit weights with fp32 copies under FSDP alone"
    if "amp_native" in names and is_fsdp:
        yield "amp_native with FSDP: Accelerate gathers weights in 16 bits, as half does"
    if any(getattr(method, "offload_to_cpu", False) for method in strategy) and is_ddp:
        yield "checkpoint with offload_to_cpu: Accelerate has it with FSDP"


def write(setup: TrainingSetup) -> dict[str, str]:
    return {
        NAME: yaml_text(config_of(setup)),
        transformers.NAME: transformers.text_of(setup, **_without_recompute(setup)),
    }


def _without_recompute(setup: TrainingSetup) -> dict[str, Any]:
    """Arguments of Transformers that switch its own recomputation off where FSDP has one."""
    return {"gradient_checkpointing": False} if fsdp_of(setup) else {}


def config_of(setup: TrainingSetup) -> dict[str, Any]:
    """The values of the file of a setup that `lacks` nothing."""
    world = setup.world_size or 1
    methods: dict[str, Any] = {method.name: method for method in setup.strategy(world)}
    fsdp, precision = fsdp_of(setup), next((methods[n] for n in ("half", "amp_native") if n in methods), None)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else "MULTI_GPU" if world > 1 else "NO",
        "num_machines": setup.num_nodes or 1,
        "num_processes": world,
        "machine_rank": 0,
        "mixed_precision": "fp8" if "fp8" in methods else precision.dtype if precision is not None else "no",
        "rdzv_backend": "static",
        "main_training_function": "main",
    }
    if fsdp:
        config["fsdp_config"] = fsdp
    sizes = dict(setup.axes)
    if fsdp and any(size > 1 for size in sizes.values()):
        zero, shares = sizes.get("zero", 1), setup.shares(world)
        mesh = {"dp_replicate_size": shares // zero if zero > 1 else 1, "dp_shard_size": zero if zero > 1 else shares}
        mesh |= {"tp_size": sizes.get("tensor", 1), "cp_size": sizes.get("context", 1)}
        config["parallelism_config"] = {PARALLEL + key: value for key, value in mesh.items()}
    if "compile" in methods:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    if "fp8" in methods:
        config["fp8_config"] = {"backend": "AO"}
    return config


def fsdp_of(setup: TrainingSetup) -> dict[str, Any]:
    """The fsdp_config of a setup; empty if nothing is sharded."""
    methods: dict[str, Any] = {method.name: method for method in setup.strategy(setup.world_size or 1)}
    if not {"fsdp", "zero2"} & set(methods):
        return {}
    recompute = methods.get("checkpoint")
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": "fsdp" in methods,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": "offload" in methods,
        "fsdp_activation_checkpointing": recompute is not None,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        **({"fsdp_activation_checkpointing_offload": True} if getattr(recompute, "offload_to_cpu", False) else {}),
    }


def command(setup: TrainingSetup) -> str:
    return (
        f"accelerate launch --config_file {NAME} --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR "
        f"--main_process_port $MASTER_PORT train.py "
        f"{transformers.flags_of(setup, **_without_recompute(setup))}"
    )


TARGET = Target("accelerate", "Accelerate", recognises, read, lacking, write, command, NARROW)
