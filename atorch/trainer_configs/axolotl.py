"""Axolotl's configuration (YAML), alone or named in `axolotl train`. It is read, and not written.

Keys and defaults are those of src/axolotl/utils/schemas at the commit of `known/axolotl.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from atorch.errors import ArgumentError
from atorch.trainer_configs import transformers
from atorch.trainer_configs.keys import Keys, lora_of, read_launcher, read_optimizer, split_launch
from atorch.trainer_configs.setup import NARROW, NO_EFFECT, Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.source import Fields, Source, options_of, values_of

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

ATTENTION = ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "sage_attention")
OPTIMIZERS: Mapping[str, tuple[str, Kind]] = {
    **transformers.OPTIMIZERS,
    **{"ao_adamw_8bit": ("adamw8bit", "used"), "sgd": ("sgd", "used"), "muon": ("muon", "used")},
    **{"lion_pytorch": ("lion", "used"), "lion_8bit": ("lion", "not expressed")},
    "paged_lion_8bit": ("lion", "not expressed"),
}


def recognises(source: Source) -> bool:
    if any(re.search(r"(^|/)axolotl($|\.cli)", word) for word in source.words):
        return True
    mine = ("sequence_len", "micro_batch_size", "datasets", "adapter", "lora_r", "val_set_size")
    return "base_model" in source.data and any(key in source.data for key in mine)


def read(source: Source) -> TrainingSetup:
    keys, draft, entries, values = Keys.of("axolotl"), Draft(traits=TARGET.traits), list[Entry](), dict(source.data)
    if source.words:
        words = source.command
        named = next((word for word in words if word.endswith((".yaml", ".yml"))), None)
        if named is None:
            raise ArgumentError(f"{source.name} names no file of Axolotl's; give its .yaml")
        values = values_of(source.beside(named))
        more = words[words.index(named) + 1 :]
        end = more.index("--") if "--" in more else len(more)  # words of the launcher follow
        told = read_launcher([*split_launch(words)[0], *more[end + 1 :]], source.environment, draft)
        given = {name.lstrip("-").replace("-", "_"): value for name, value in options_of(more[:end])[0].items()}
        entries += [Entry("--launcher", given.pop("launcher"), *NO_EFFECT)] if "launcher" in given else []
        is_negated = {key: key.startswith("no_") and key[3:] in keys.names for key in given}
        values |= {key[3:] if is_negated[key] else key: not is_negated[key] and given[key] for key in given}
        entries += [Entry("config", named, "used", "its keys follow"), *told]
    fields = Fields(source.name, values, "", entries)
    model = values.get("base_model")
    draft.fields["model"] = model if isinstance(model, str) else None
    fields.tell_used(f"the model {model}", "base_model")
    _read_adapters(fields, draft)
    _read_batches(fields, draft)
    _read_mesh(fields, draft)
    _read_fsdp(fields, draft)
    extra = _read_deepspeed(fields, draft, source)
    _read_precision(fields, draft)
    _read_kernels(fields, draft)
    return draft.setup(TARGET.name, (*fields.finish(keys), *extra))


def _read_adapters(fields: Fields, draft: Draft) -> None:
    adapter = fields.word("adapter")
    is_4bit = bool(fields.flag("load_in_4bit")) or adapter == "qlora"
    if adapter is None:
        keys = ("adapter", "lora_r", "lora_target_modules", "lora_target_linear", "lora_alpha", "lora_dropout")
        note = "no adapters are trained: all of the model is"
        fields.tell_given("no effect", note, *keys, "load_in_4bit", "load_in_8bit")
        return
    rank, targets = fields.size("lora_r", 8), fields.data.get("lora_target_modules")
    lora, kind = lora_of(rank, targets, bool(fields.flag("lora_target_linear")))
    draft.knobs |= {"lora": lora} | ({"qlora": True} if is_4bit else {})
    note = f"lora {lora}: adapters beside {'4-bit' if is_4bit else 'frozen'} weights"
    fields.tell_given("used" if adapter in ("lora", "qlora") else "not expressed", note, "adapter")
    if kind == "not expressed":
        fields.tell_given(kind, "beside every linear layer in the estimate", "lora_target_modules")
    if fields.flag("load_in_8bit") and not is_4bit:
        fields.tell_given("not expressed", "frozen weights are in 16 bits in the estimate", "load_in_8bit")
    fields.tell_used("no 8-bit weights", "load_in_8bit")
    fields.tell_used(note, "lora_r", "lora_target_modules", "lora_target_linear", "load_in_4bit")
    fields.tell_setting("lora_r", f"{rank}, peft's default")


def _read_batches(fields: Fields, draft: Draft) -> None:
    micro, count, total = map(fields.whole, ("micro_batch_size", "gradient_accumulation_steps", "batch_size"))
    if total is not None and count is None:
        count = max(1, total // (micro or 1))
    draft.fields |= {"micro_batch": micro or 1, "accumulation": count or 1}
    draft.fields["seq"] = fields.size("sequence_len", 512)
    if micro is None:
        fields.tell("micro_batch_size", "assumed", "1, Axolotl's default")
    if count is None:
        fields.tell("gradient_accumulation_steps", "assumed", "1, Axolotl's default")
    packed = "samples are packed" if fields.flag("sample_packing") else "shorter samples are reckoned as full"
    fields.tell_setting("sequence_len", f"tokens of a sample; {packed}")
    fields.tell_used(packed, "sample_packing")


def _read_mesh(fields: Fields, draft: Draft) -> None:
    tensor, context = fields.size("tensor_parallel_size"), fields.size("context_parallel_size")
    context = max(context, fields.size("sequence_parallel_degree"))
    shards, copies = fields.whole("dp_shard_size"), fields.size("dp_replicate_size")
    fields.tell_used(draft.split("tensor", tensor, "tensor_parallel"), "tensor_parallel_size")
    along = draft.split("context", context, "context_parallel")
    fields.tell_used(along, "context_parallel_size", "sequence_parallel_degree")
    if shards is not None and copies > 1 and shards > 1:
        draft.axes |= {"zero": shards, "data": copies}
    elif shards is not None:
        draft.axes["data"] = shards * copies


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

    version = fields.whole("fsdp_version") or inner.size("fsdp_version")
    sharding = str(inner.data.get(key_of("sharding_strategy"), "FULL_SHARD")).upper()
    frees = inner.flag(key_of("reshard_after_forward"))
    keeps = frees is False if version == 2 else sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "2", "5")
    name = "ddp" if version == 1 and sharding in ("NO_SHARD", "3") else "zero2" if keeps else "fsdp"
    if name != "ddp":
        draft.add(name)
    draft.fields["reduces_each"] = False
    note = f"{name}: all is sharded" if name == "fsdp" else f"{name}, of FSDP{version}"
    fields.tell_used(note, "fsdp", "fsdp_version")
    inner.tell_used(note, *map(key_of, ("sharding_strategy", "reshard_after_forward", "version")))
    if "offload" in listed or is_on("offload_params"):
        draft.add("offload", parameters=1.0)
    if is_on("activation_checkpointing"):
        draft.add("checkpoint")
    note = "offload: shards in host memory" if draft.has("offload") else "no offload"
    inner.tell_used(note, key_of("offload_params"))
    inner.tell_used("checkpoint" if draft.has("checkpoint") else "no checkpoint", key_of("activation_checkpointing"))
    inner.tell_used("the model is gathered block by block", key_of("auto_wrap_policy"))
    inner.tell_used("the blocks, which atorch finds by itself", key_of("transformer_layer_cls_to_wrap"))


def _read_deepspeed(fields: Fields, draft: Draft, source: Source) -> tuple[Entry, ...]:
    """Add a configuration of DeepSpeed, and return the entries of its keys."""
    named = fields.data.get("deepspeed")
    if not named:
        return ()
    from atorch.trainer_configs import deepspeed

    draft.set_traits(**deepspeed.WHOLE)
    if draft.has("fsdp", "zero2"):
        raise fields.invalid("deepspeed", "fsdp_config is given as well, and Axolotl takes one of them")
    draft.precision = "fp16" if fields.flag("fp16") else "bf16"
    path = source.beside(str(named))
    if isinstance(named, Mapping) or (isinstance(named, str) and path.is_file()):
        values = named if isinstance(named, Mapping) else values_of(path)
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
    knobs, note = draft.knobs, f"computed in {dtype}"
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
    fields.tell_used(note, "fp16", "bfloat16", "float16", "float32")
    read_optimizer(fields, "optimizer", OPTIMIZERS, draft)
    if "optimizer" not in fields:
        fields.tell("optimizer", "assumed", "optimizer adamw")


def _read_kernels(fields: Fields, draft: Draft) -> None:
    """Attention, recomputation, compilation, the loss and fp8."""
    how = str(fields.data.get("attn_implementation") or "")
    if how == "eager" or fields.flag("eager_attention"):
        draft.knobs["attention"] = "eager"
    elif fields.flag("flash_attention") or how.startswith("flash"):
        draft.knobs["attention"] = "flash_attention_2"
    note = f"attention {draft.knobs.get('attention', 'sdpa')}"
    fields.tell_used(note, *ATTENTION, "attn_implementation", "eager_attention")
    given = fields.data.get("gradient_checkpointing")
    on_host = given in ("offload", "offload_disk")
    if on_host or fields.flag("gradient_checkpointing"):
        draft.add("checkpoint", **({"offload_to_cpu": True} if on_host else {}))
    note = "checkpoint: blocks are recomputed" if draft.has("checkpoint") else "activations are kept"
    fields.tell_given("not expressed", note, "selective_checkpointing")
    kind: Kind = "not expressed" if given == "offload_disk" else "used"
    fields.tell_given(kind, f"{note}{', their inputs in host memory' if on_host else ''}", "gradient_checkpointing")
    if fields.data.get("activation_offloading"):
        fields.tell("activation_offloading", "not expressed", "activations stay on devices")
    if fields.flag("torch_compile"):
        draft.add("compile")
    fields.tell_used("compile" if draft.has("compile") else "no compile", "torch_compile")
    if fields.flag("fp8"):
        draft.add("fp8", backend="torchao", exclude=["head"])
    fields.tell_used("fp8 (torchao)" if draft.has("fp8") else "no fp8", "fp8")
    plugins = fields.data.get("plugins")
    named = " ".join(map(str, plugins)).lower() if isinstance(plugins, list) else str(plugins or "").lower()
    cut = "cut_cross_entropy" in named and fields.flag("cut_cross_entropy") is not False
    liger = "liger" in named and bool(fields.flag("liger_fused_linear_cross_entropy"))
    if cut or liger:
        draft.add("cross_entropy")
    note = "cross_entropy: logits by chunks of tokens" if cut or liger else "logits are held whole"
    fields.tell_used(note, "plugins", "cut_cross_entropy", "liger_fused_linear_cross_entropy")


def lacking(strategy: Strategy) -> Iterator[str]:
    yield "every method: atorch reads Axolotl's files and writes none"


TARGET = Target("axolotl", "Axolotl", recognises, read, lacking, lambda setup: {}, lambda setup: "", NARROW)
