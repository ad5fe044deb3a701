"""Axolotl's configuration (YAML), alone or named in `axolotl train`. It is read, and not written.

Keys and defaults are those of src/axolotl/utils/schemas at the commit of `known/axolotl.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atorch.errors import ArgumentError
from atorch.trainer_configs.keys import NO_EFFECT, Keys, file_of, number, processes, split_launch, tell_not_expressed
from atorch.trainer_configs.setup import NARROW, Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.shell import command_of
from atorch.trainer_configs.source import Fields, Source, options_of, values_of

ATTENTION = ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "sage_attention")
OPTIMIZERS: Mapping[str, tuple[str, Kind]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ("adamw", "used")),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit"), ("adamw8bit", "used")),
    **{"paged_adamw_8bit": ("adamw8bit", "not expressed"), "paged_adamw_32bit": ("adamw", "not expressed")},
    **{"adafactor": ("adafactor", "used"), "sgd": ("sgd", "used"), "muon": ("muon", "used")},
    **dict.fromkeys(("lion_32bit", "lion_pytorch", "lion"), ("lion", "used")),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "paged_lion_32bit"), ("lion", "not expressed")),
}
PROJECTIONS = frozenset(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def recognises(source: Source) -> bool:
    if any(re.search(r"(^|/)axolotl($|\.cli)", word) for word in source.words):
        return True
    mine = ("sequence_len", "micro_batch_size", "datasets", "adapter", "lora_r", "val_set_size")
    return "base_model" in source.data and any(key in source.data for key in mine)


def read(source: Source) -> TrainingSetup:
    """See `Target.read`."""
    keys, draft, entries, values = Keys.of("axolotl"), Draft(traits=TARGET.traits), list[Entry](), dict(source.data)
    if source.words:
        command, _ = command_of(source)
        named = next((word for word in command.words if word.endswith((".yaml", ".yml"))), None)
        if named is None:
            raise ArgumentError(f"{source.name} names no file of Axolotl's; give its .yaml")
        values = values_of(file_of(source, named) or Path(named))
        more = command.words[command.words.index(named) + 1 :]
        end = more.index("--") if "--" in more else len(more)  # words of the launcher follow
        nodes, per_node, told = processes([*split_launch(command.words)[0], *more[end + 1 :]], command.variables)
        given = {name.lstrip("-").replace("-", "_"): value for name, value in options_of(more[:end])[0].items()}
        entries += [Entry("--launcher", given.pop("launcher"), *NO_EFFECT)] if "launcher" in given else []
        is_negated = {key: key.startswith("no_") and key[3:] in keys.names for key in given}
        values |= {key[3:] if is_negated[key] else key: not is_negated[key] and given[key] for key in given}
        entries += [Entry("config", named, "used", "its keys follow"), *told]
        draft.fields |= {"num_nodes": nodes, "devices_per_node": per_node}
    fields = Fields(source.name, values, "", entries)
    model = values.get("base_model")
    draft.fields["model"] = model if isinstance(model, str) else None
    fields.tell_all({"base_model": ("used", f"the model {model}")})
    _read_adapters(fields, draft)
    _read_batches(fields, draft)
    _read_mesh(fields, draft)
    _read_fsdp(fields, draft)
    extra = _read_deepspeed(fields, draft, source)
    _read_precision(fields, draft)
    _read_kernels(fields, draft)
    tell_not_expressed(fields, keys)
    names = [*keys.types["$"], *keys.types["plugins"]]
    fields.tell_all(dict.fromkeys((key for key in values if key in names), NO_EFFECT))
    return draft.setup(TARGET.name, (*fields.finish(names), *extra))


def _read_adapters(fields: Fields, draft: Draft) -> None:
    adapter = fields.word("adapter")
    is_4bit = bool(fields.flag("load_in_4bit")) or adapter == "qlora"
    knobs: dict[str, Any] = draft.fields["knobs"]
    if adapter is None:
        note: tuple[Kind, str] = ("no effect", "no adapters are trained: all of the model is")
        fields.tell_all(dict.fromkeys(("lora_r", "lora_target_modules", "lora_target_linear", "load_in_4bit"), note))
        fields.tell_all(dict.fromkeys(("adapter", "load_in_8bit", "lora_alpha", "lora_dropout"), note))
        return
    rank = number(fields, "lora_r", default=8)
    given = fields.data.get("lora_target_modules")
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    bare = {str(name).rpartition(".")[2] for name in names}
    all_of = bool(fields.flag("lora_target_linear")) or not bare or bool(bare & {"all-linear"})
    known = all_of or bare <= PROJECTIONS
    knobs["lora"] = str(rank) if all_of or not known else f"{rank}:{','.join(sorted(bare))}"
    knobs |= {"qlora": True} if is_4bit else {}
    words = f"lora {knobs['lora']}: adapters beside {'4-bit' if is_4bit else 'frozen'} weights"
    note = ("used", words)
    kind: Kind = "used" if adapter in ("lora", "qlora") else "not expressed"
    fields.tell_all({
        "adapter": (kind, words),
        "lora_target_modules": note if known else ("not expressed", "beside every linear layer in the estimate"),
        "load_in_8bit": ("not expressed", "frozen weights are in 16 bits in the estimate")
        if fields.flag("load_in_8bit") and not is_4bit
        else ("used", "no 8-bit weights"),
        **dict.fromkeys(("lora_r", "lora_target_linear", "load_in_4bit"), note),
    })  # fmt: skip
    if "lora_r" not in fields:
        fields.tell("lora_r", "assumed", f"{rank}, peft's default")


def _read_batches(fields: Fields, draft: Draft) -> None:
    micro, count, total = (
        number(fields, key) for key in ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    )
    if total is not None and count is None:
        count = max(1, total // (micro or 1))
    draft.fields |= {"micro_batch": micro or 1, "accumulation": count or 1}
    draft.fields["seq"] = number(fields, "sequence_len", default=512)
    for key in ("micro_batch_size", "gradient_accumulation_steps"):
        if key not in fields and not (total and key == "gradient_accumulation_steps"):
            fields.tell(key, "assumed", "1, Axolotl's default")
    packed = "samples are packed" if fields.flag("sample_packing") else "shorter samples are reckoned as full"
    fields.tell("sequence_len", "used" if "sequence_len" in fields else "assumed", f"tokens of a sample; {packed}")
    fields.tell_all({
        "micro_batch_size": ("used", "samples of a micro-batch"),
        "gradient_accumulation_steps": ("used", "micro-batches of a step"),
        "batch_size": ("used", "samples of a step on a device, Axolotl's old key"),
        "sample_packing": ("used", packed),
    })  # fmt: skip


def _read_mesh(fields: Fields, draft: Draft) -> None:
    tensor, context = number(fields, "tensor_parallel_size", default=1) or 1, 1
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        context = max(context, number(fields, key, default=1) or 1)
    shards, copies = number(fields, "dp_shard_size"), number(fields, "dp_replicate_size", default=1) or 1
    draft.split("tensor", tensor, "tensor_parallel")
    draft.split("context", context, "context_parallel")
    axes = draft.fields["axes"]
    if shards is not None and copies > 1 and shards > 1:
        axes |= {"zero": shards, "data": copies}
    elif shards is not None:
        axes["data"] = shards * copies
    along: tuple[Kind, str] = ("used", f"context {context}: context_parallel" if context > 1 else "no split")
    fields.tell_all({
        "tensor_parallel_size": ("used", f"tensor {tensor}: tensor_parallel" if tensor > 1 else "no split"),
        "dp_shard_size": ("used", "processes that shard (zero, or data without copies)"),
        "dp_replicate_size": ("used", "copies that see different samples (data)"),
        "context_parallel_size": along,
        "sequence_parallel_degree": along,
    })  # fmt: skip


def _read_fsdp(fields: Fields, draft: Draft) -> None:
    words, config = fields.data.get("fsdp"), fields.data.get("fsdp_config")
    if not words and not config:
        return
    if config is not None and not isinstance(config, Mapping):
        raise fields.invalid("fsdp_config", "it is a mapping of keys to values")
    inner = fields.within("fsdp_config")
    listed = [str(word).lower() for word in words] if isinstance(words, list) else str(words or "").lower().split()

    def key_of(name: str) -> str:
        return name if name in inner.data else f"fsdp_{name}"

    def is_on(name: str) -> bool:
        return bool(inner.flag(key_of(name)))

    version = number(fields, "fsdp_version") or number(inner, "fsdp_version") or 1
    sharding = str(inner.data.get(key_of("sharding_strategy"), "FULL_SHARD")).upper()
    frees = inner.flag(key_of("reshard_after_forward"))
    keeps = frees is False if version == 2 else sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "2", "5")
    name = "ddp" if version == 1 and sharding in ("NO_SHARD", "3") else "zero2" if keeps else "fsdp"
    if name != "ddp":
        draft.add(name)
    draft.fields["reduces_each"] = False
    note: tuple[Kind, str] = ("used", f"{name}: all is sharded" if name == "fsdp" else f"{name}, of FSDP{version}")
    fields.tell_all({"fsdp": note, "fsdp_version": note})
    inner.tell_all(dict.fromkeys(map(key_of, ("sharding_strategy", "reshard_after_forward", "version")), note))
    if "offload" in listed or is_on("offload_params"):
        draft.add("offload", parameters=1.0)
    if is_on("activation_checkpointing"):
        draft.add("checkpoint")
    inner.tell_all({
        key_of("offload_params"): ("used", "offload: shards in host memory" if draft.has("offload") else "no offload"),
        key_of("activation_checkpointing"): ("used", "checkpoint" if draft.has("checkpoint") else "no checkpoint"),
        key_of("auto_wrap_policy"): ("used", "the model is gathered block by block"),
        key_of("transformer_layer_cls_to_wrap"): ("used", "the blocks, which atorch finds by itself"),
    })  # fmt: skip
    known = Keys.of("axolotl").types["fsdp_config"]
    older = ("limit_all_gathers", "forward_prefetch", "backward_prefetch", "sharding_strategy", "cpu_offload")
    for key in inner.data:
        if key.removeprefix("fsdp_") in (*known, *older):
            inner.tell(key, *NO_EFFECT)


def _read_deepspeed(fields: Fields, draft: Draft, source: Source) -> tuple[Entry, ...]:
    """Add a configuration of DeepSpeed, and return the entries of its keys."""
    named = fields.data.get("deepspeed")
    if not named:
        return ()
    from atorch.trainer_configs import deepspeed

    if draft.has("fsdp", "zero2"):
        raise fields.invalid("deepspeed", "fsdp_config is given as well, and Axolotl takes one of them")
    draft.precision = "fp16" if fields.flag("fp16") else "bf16"
    path = file_of(source, named) if isinstance(named, str) else None
    if isinstance(named, Mapping) or path is not None:
        values = named if isinstance(named, Mapping) else values_of(path or Path())
        fields.tell("deepspeed", "used", "DeepSpeed's configuration; its keys follow")
        return tuple(deepspeed.read_config(Fields("deepspeed", values, "deepspeed: "), draft, "Axolotl"))
    stage = re.search(r"zero_?([123])", str(named).lower())
    if stage is None:
        raise fields.invalid("deepspeed", "there is no such file; put it beside the configuration")
    name = {"1": "zero1", "2": "zero2", "3": "fsdp"}[stage[1]]
    draft.add(name)
    draft.add("half", dtype=draft.precision)
    draft.fields["reduces_each"] = name != "zero1"
    if "cpuoffload" in str(named).lower().replace("_", ""):
        draft.add("offload", **({"parameters": 1.0} if name == "fsdp" else {}))
    fields.tell("deepspeed", "assumed", f"{name} by the file's name: the file is not here")
    return ()


def _read_precision(fields: Fields, draft: Draft) -> None:
    """16-bit weights, but fp32 shards under FSDP and DeepSpeed, and fp32 weights where no key says 16 bits."""
    bf16, narrow = fields.data.get("bf16", "auto"), fields.flag("bfloat16") or fields.flag("float16")
    if bf16 not in (None, "auto", "full") and fields.flag("bf16") is None:
        raise fields.invalid("bf16", "it is auto, full, true or false")
    if bf16 not in (None, False, "false", "auto") and fields.flag("fp16"):
        raise fields.invalid("fp16", "bf16 is on as well, and Axolotl takes one of them")
    is_fp16, is_off = bool(fields.flag("fp16")), bf16 in (None, False, "false")
    dtype = "fp16" if is_fp16 or fields.flag("float16") else "bf16"
    knobs = draft.fields["knobs"]
    note = f"computed in {dtype}"
    told: Kind = "used" if {"bf16", "fp16"} & fields.data.keys() else "assumed"
    if knobs.get("lora"):
        knobs |= {"dtype": "fp16"} if is_fp16 else {}
        note = f"frozen weights in {dtype}"
    elif is_off and not is_fp16 and not narrow or fields.flag("float32"):
        note = "computed in fp32"
    elif draft.has("half", "amp_native"):
        note = f"half: {dtype}, as DeepSpeed has it"
    elif draft.has("fsdp", "zero2"):
        draft.add("half", dtype=dtype)
        note = f"half: weights are gathered in {dtype}, and the optimizer steps fp32 shards"
    elif is_fp16 and not narrow:
        draft.add("amp_native", dtype="fp16")
        note = "amp_native: products in fp16"
    else:
        knobs["dtype"] = dtype
        note = f"dtype {dtype}: weights without fp32 copies"
    fields.tell("bf16", told, note)
    fields.tell_all(dict.fromkeys(("fp16", "bfloat16", "float16", "float32"), ("used", note)))
    kind = fields.word("optimizer")
    name, exact = OPTIMIZERS.get(kind or "adamw_torch_fused", ("adamw", "not expressed"))
    knobs |= {"optimizer": name} if name != "adamw" else {}
    more = "" if exact == "used" else " in the estimate, on devices"
    fields.tell("optimizer", exact if kind else "assumed", f"optimizer {name}{more}")


def _read_kernels(fields: Fields, draft: Draft) -> None:
    """Attention, recomputation, compilation, the loss and fp8."""
    how = str(fields.data.get("attn_implementation") or "")
    if how == "eager" or fields.flag("eager_attention"):
        draft.fields["knobs"]["attention"] = "eager"
    elif fields.flag("flash_attention") or how.startswith("flash"):
        draft.fields["knobs"]["attention"] = "flash_attention_2"
    note = f"attention {draft.fields['knobs'].get('attention', 'sdpa')}"
    fields.tell_all(dict.fromkeys((*ATTENTION, "attn_implementation", "eager_attention"), ("used", note)))
    given = fields.data.get("gradient_checkpointing")
    on_host = given in ("offload", "offload_disk")
    if on_host or fields.flag("gradient_checkpointing"):
        draft.add("checkpoint", **({"offload_to_cpu": True} if on_host else {}))
    recomputed = "checkpoint: blocks are recomputed" if draft.has("checkpoint") else "activations are kept"
    kind: Kind = "not expressed" if given == "offload_disk" else "used"
    fields.tell_all({
        "gradient_checkpointing": (kind, f"{recomputed}{', their inputs in host memory' if on_host else ''}"),
        "activation_offloading": ("not expressed", "activations stay on devices")
        if fields.data.get("activation_offloading")
        else NO_EFFECT,
        "selective_checkpointing": ("not expressed", recomputed),
    })  # fmt: skip
    if fields.flag("torch_compile"):
        draft.add("compile")
    fields.tell_all({"torch_compile": ("used", "compile" if draft.has("compile") else "no compile")})
    if fields.flag("fp8"):
        draft.add("fp8", backend="torchao", exclude=["head"])
    fields.tell_all({"fp8": ("used", "fp8 (torchao)" if draft.has("fp8") else "no fp8")})
    plugins = fields.data.get("plugins")
    named = " ".join(map(str, plugins)).lower() if isinstance(plugins, list) else str(plugins or "").lower()
    cut = "cut_cross_entropy" in named and fields.flag("cut_cross_entropy") is not False
    liger = "liger" in named and bool(fields.flag("liger_fused_linear_cross_entropy"))
    if cut or liger:
        draft.add("cross_entropy")
    loss = "cross_entropy: logits by chunks of tokens" if cut or liger else "logits are held whole"
    keys = ("plugins", "cut_cross_entropy", "liger_fused_linear_cross_entropy")
    fields.tell_all(dict.fromkeys(keys, ("used", loss)))


TARGET = Target(
    name="axolotl",
    title="Axolotl",
    recognises=recognises,
    read=read,
    lacks=lambda strategy: ("every method: atorch reads Axolotl's files and writes none",),
    write=lambda setup: {},
    command=lambda setup: "",
    traits=NARROW,
)
