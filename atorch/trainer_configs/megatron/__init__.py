"""Megatron-LM's command line, alone or in a shell script.

Flags and defaults are those of megatron/training/arguments.py and the dataclasses that it makes flags of, at the commit
of `known/megatron.json`. In 16 bits Megatron steps fp32 copies of the weights, as `half` does, and adds gradients up in
fp32 or 16 bits, in the buckets that it reduces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from atorch.trainer_configs.keys import Keys, read_launcher, split_launch
from atorch.trainer_configs.megatron.flags import NAME, OPTIMIZERS, SHARDING, SIZES, TRAITS, lacking, write
from atorch.trainer_configs.setup import Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.shell import is_known
from atorch.trainer_configs.source import Fields, Source, options_of

MARKS = frozenset(
    ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers", "--hidden-size", "--seq-length")
    + ("--num-attention-heads", "--micro-batch-size", "--global-batch-size", "--use-distributed-optimizer")
)
OWN_CUT = "the cut whose slowest stage is fastest, in the estimate"
EXPERTS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--num-experts")
VOCABULARIES: Mapping[str, int] = {
    **{"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522, "TikTokenizer": 131072},
    **{"BertWordPieceCase": 28996},
}


def recognises(source: Source) -> bool:
    return len(MARKS.intersection(word.partition("=")[0] for word in _words(source))) > 1


def _words(source: Source) -> tuple[str, ...]:
    """The words of the command; of a file that only sets variables, those of their values."""
    values = tuple(word for texts in source.variables.values() for text in texts for word in text.split())
    return source.command if MARKS.isdisjoint(values) or not MARKS.isdisjoint(source.command) else values


def read(source: Source) -> TrainingSetup:
    keys = Keys.of("megatron")
    launcher, _, words = split_launch(_words(source))
    draft = Draft(traits=TRAITS)
    entries = read_launcher(launcher, source.environment, draft)
    options, rest = options_of(words, keys.facts["types"]["flag"])
    told = "only a run tells what it holds; give the script's arguments: --explain 'bash train.sh 8B …'"
    entries += [Entry(word, None, "assumed", told) for word in rest if not is_known(word)]
    fields = Fields(source.name, options, "", entries)
    tensor = _read_mesh(fields, draft)
    _read_sharding(fields, draft)
    _read_precision(fields, draft)
    _read_gradients(fields, draft)
    _read_recompute(fields, draft)
    _read_batches(fields, draft)
    _read_optimizer(fields, draft)
    _read_shape(fields, draft, tensor)
    return draft.setup(TARGET.name, fields.finish(keys))


def _read_mesh(fields: Fields, draft: Draft) -> int:
    """Add the axes, and return the size of tensor."""
    if "--model-parallel-size" in fields:
        raise fields.invalid("--model-parallel-size", "Megatron has --tensor-model-parallel-size in its place")
    tensor = fields.size("--tensor-model-parallel-size")
    fields.tell_used(draft.split("tensor", tensor, "tensor_parallel"), "--tensor-model-parallel-size")
    by_tokens = tensor > 1 and "--sequence-parallel" in fields
    if by_tokens:
        draft.add("sequence_parallel", mode="megatron")
        fields.tell("--sequence-parallel", "used", "sequence_parallel (megatron): tokens outside of products are split")
    fields.tell_given("no effect", "Megatron turns it off without tensor parallelism", "--sequence-parallel")
    context, how = fields.size("--context-parallel-size"), str(fields.data.get("--cp-comm-type", "p2p"))
    if how == "a2a" and context > 1 and by_tokens:
        raise fields.invalid("--cp-comm-type", "beside --sequence-parallel the planner has a ring (p2p) alone")
    axis, ring = "sequence" if how == "a2a" else "context", "keys and values pass around a ring"
    fields.tell_used(draft.split(axis, context, f"{axis}_parallel"), "--context-parallel-size")
    if how not in ("a2a", "p2p") and context > 1:
        fields.tell("--cp-comm-type", "not expressed", f"{ring} in the estimate")
    fields.tell_used("sequence_parallel (ulysses)" if how == "a2a" else ring, "--cp-comm-type")
    _share_experts(fields, draft, tensor)
    _read_pipeline(fields, draft)
    return tensor


def _share_experts(fields: Fields, draft: Draft, tensor: int) -> None:
    """Whole experts on as many processes as Megatron has parts of experts on, if they divide the experts."""
    size, split, count = map(fields.size, EXPERTS, (1, tensor, 1))
    if size > 1 and count % (size * split):
        note = f"{count} experts do not divide by {size} × {split}; they are split as other layers"
        fields.tell_given("not expressed", note, *EXPERTS[:2])
        return
    sends_once = "--moe-enable-deepep" in fields or "--moe-flex-dispatcher-backend" in fields
    config = {"dispatcher": "deepep"} if sends_once else {}
    fields.tell_used(draft.share_experts(size * split if size > 1 else 1, **config), *EXPERTS[:2])


def _read_pipeline(fields: Fields, draft: Draft) -> None:
    stages, per = fields.size("--pipeline-model-parallel-size"), "--num-layers-per-virtual-pipeline-stage"
    layers, per_piece = fields.whole("--num-layers"), fields.whole(per)
    pieces = fields.size("--num-virtual-stages-per-pipeline-rank")
    if per_piece is not None and layers is not None:
        if layers % (stages * per_piece):
            raise fields.invalid(per, f"{layers} blocks do not divide by it and {stages} stages")
        pieces = layers // (stages * per_piece)
    layout = fields.data.get("--pipeline-model-parallel-layout")
    if isinstance(layout, str) and re.fullmatch(r"[\w|*(),]{1,200}", layout) and "*" not in layout:
        pieces = max(1, (layout.count("|") + 1) // stages)
    config = {"schedule": "interleaved", **({"interleave": pieces} if pieces > 2 else {})} if pieces > 1 else {}
    note = draft.split("pipeline", stages, "pipeline_parallel", **config)
    draft.set_traits(sends_beside=pieces > 1 and "--no-overlap-p2p-communication" not in fields)
    fields.tell_used(f"pipeline {stages}: stages under 1F1B" if stages > 1 else note, "--pipeline-model-parallel-size")
    many = f"{pieces} pieces of the model on a process, interleaved" if stages > 1 else "there is one stage"
    fields.tell_given(*(("used", many) if layers else ("not expressed", OWN_CUT)), per)
    fields.tell_used(many, "--num-virtual-stages-per-pipeline-rank")
    fields.tell_given("not expressed", f"{many}; {OWN_CUT}", "--pipeline-model-parallel-layout")


def _read_sharding(fields: Fields, draft: Draft) -> None:
    strategy = str(fields.data.get("--data-parallel-sharding-strategy", "optim_grads_params"))
    name = "zero1" if "--use-distributed-optimizer" in fields else "ddp"
    sharded = next((flag for flag in ("--use-megatron-fsdp", "--use-custom-fsdp") if flag in fields), None)
    if sharded is not None:
        if strategy not in SHARDING:
            raise fields.invalid("--data-parallel-sharding-strategy", f"it is one of {', '.join(SHARDING)}")
        name = SHARDING[strategy]
        fields.tell(sharded, "used", f"{name}, by --data-parallel-sharding-strategy {strategy}")
    elif "--use-torch-fsdp2" in fields:
        keeps = "--torch-fsdp2-no-reshard-after-forward" in fields
        name = "zero2" if keeps else "fsdp"
        note = f"{name}: {'gathered weights are kept' if keeps else 'all is sharded'}"
        fields.tell("--use-torch-fsdp2", "used", note)
    if name != "ddp":
        draft.add(name)
    note = "zero1: optimizer states are sharded" if name == "zero1" else f"{name} shards them"
    fields.tell_used(note, "--use-distributed-optimizer")
    fields.tell_given("used" if sharded else "no effect", name, "--data-parallel-sharding-strategy")
    fields.tell_used("zero2: gathered weights are kept for backward", "--torch-fsdp2-no-reshard-after-forward")
    draft.fields["reduces_each"] = name in ("zero2", "fsdp")


def _read_precision(fields: Fields, draft: Draft) -> None:
    words = [word for word in ("bf16", "fp16") if f"--{word}" in fields]
    if len(words) > 1:
        raise fields.invalid("--fp16", "--bf16 is given as well, and Megatron takes one of them")
    for word in words:
        draft.add("half", dtype=word)
        fields.tell(f"--{word}", "used", f"half {word}: 16-bit weights, and fp32 copies that the optimizer steps")
    if not words:
        fields.tell("--bf16", "assumed", "computed in fp32: neither --bf16 nor --fp16 is given")
    format_ = fields.data.get("--fp8-format", fields.data.get("--fp8"))
    form = "HYBRID" if "--fp8-hybrid" in fields or format_ == "hybrid" else "E4M3"
    if format_ is not None or "--fp8-hybrid" in fields or "--fp8-e4m3" in fields:
        if format_ not in (None, "hybrid", "e4m3"):
            raise fields.invalid("--fp8-format", "it is e4m3 or hybrid")
        draft.add("fp8", exclude=["head"], **({} if form == "HYBRID" else {"fp8_format": form}))
    fields.tell_used(f"fp8 {form}: products of blocks in 8 bits", "--fp8-format", "--fp8", "--fp8-hybrid", "--fp8-e4m3")
    if fields.data.get("--fp8-recipe", "delayed") != "delayed":
        fields.tell("--fp8-recipe", "not expressed", "scales of a tensor")
    fields.tell_used("scales are delayed", "--fp8-recipe")
    scores, old = "scores are not kept", "--use-flash-attn" in fields
    if fields.data.get("--attention-backend", "flash" if old else "auto") in ("unfused", "local"):
        draft.knobs["attention"] = "eager"
        scores = "attention eager: scores are written"
    fields.tell_used(scores, "--attention-backend", "--use-flash-attn")


def _read_gradients(fields: Fields, draft: Draft) -> None:
    """The type and place of accumulated gradients, and what a block keeps."""
    narrow = "--grad-reduce-in-bf16" in fields or fields.data.get("--main-grads-dtype") == "bf16"
    narrow |= "--fp16" in fields and "--accumulate-allreduce-grads-in-fp32" not in fields
    size, is_fused = 2.0 if narrow else 4.0, "--no-gradient-accumulation-fusion" not in fields
    drops = str(fields.data.get("--hidden-dropout", "0.1")).strip("0.") != ""
    draft.set_traits(main_grad_itemsize=size, adds_in_products=is_fused, placeholder_itemsize=2.0 * is_fused)
    draft.fields["traits"] = draft.fields["traits"]._replace(kernels={**TRAITS.kernels, "dropout": drops})
    note = f"gradients of {size:.0f} bytes, which micro-batches add up in and which are reduced"
    flags = ("--grad-reduce-in-bf16", "--main-grads-dtype", "--accumulate-allreduce-grads-in-fp32")
    fields.tell_used(note, *flags)
    fields.tell_used("gradients are added by operations of their own", "--no-gradient-accumulation-fusion")
    fields.tell_used("masks of dropout are kept" if drops else "no dropout", "--hidden-dropout")


def _read_recompute(fields: Fields, draft: Draft) -> None:
    how = fields.data.get("--recompute-granularity")
    is_old = next(
        (flag for flag in ("--checkpoint-activations", "--activations-checkpoint-method") if flag in fields), ""
    )
    if is_old or "--recompute-activations" in fields:
        how = how or ("full" if is_old else "selective")
    if how not in (None, "full", "selective"):
        raise fields.invalid("--recompute-granularity", "it is full or selective")
    method = fields.data.get("--recompute-method", fields.data.get("--activations-checkpoint-method"))
    count = fields.whole("--recompute-num-layers") or fields.whole("--activations-checkpoint-num-layers")
    note = "attention's scores are recomputed, as fused ones are"
    if how == "full":
        blocks = count * draft.axes.get("pipeline", 1) if method == "block" and count is not None else None
        draft.add("checkpoint", **({} if blocks is None else {"max_checkpoint_module_num": blocks}))
        note = "checkpoint: blocks are recomputed"
    fields.tell_used(note, "--recompute-granularity", "--recompute-activations", "--checkpoint-activations")
    numbers = ("--recompute-num-layers", "--activations-checkpoint-num-layers")
    if how == "full" and method != "block" and (count or 1) > 1:
        note = f"inputs of every block are kept in the estimate, not of every {count}"
        fields.tell_given("not expressed", note, *numbers)
    note = f"checkpoint: {count or 1} blocks of a stage" if method == "block" else "checkpoint: all blocks"
    fields.tell_used(note, "--recompute-method", "--activations-checkpoint-method", *numbers)
    modules = fields.data.get("--recompute-modules")
    more = set(modules if isinstance(modules, list) else [modules]) - {None, "core_attn"}
    kind: Kind = "not expressed" if more and how == "selective" else "no effect"
    fields.tell_given(kind, "only attention's scores are recomputed in the estimate", "--recompute-modules")


def _read_batches(fields: Fields, draft: Draft) -> None:
    if "--batch-size" in fields:
        raise fields.invalid("--batch-size", "Megatron has --micro-batch-size in its place")
    micro, total = fields.whole("--micro-batch-size"), fields.whole("--global-batch-size")
    draft.fields |= {"micro_batch": micro, "global_batch": total, "seq": fields.whole("--seq-length")}
    if micro is not None and total is None:
        draft.fields["accumulation"] = 1
        fields.tell("--global-batch-size", "assumed", "one micro-batch a step, Megatron's default")
    fields.tell_used("samples of a micro-batch", "--micro-batch-size")
    fields.tell_used("samples of a step on all devices", "--global-batch-size")
    fields.tell_used("tokens of a sample", "--seq-length")


def _read_optimizer(fields: Fields, draft: Draft) -> None:
    name = OPTIMIZERS.get(str(fields.data.get("--optimizer", "adam")))
    moments = {str(fields.data.get(flag, "fp32")) for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    kind: Kind = "no effect"
    note = "the optimizer does not read it"
    if "--use-precision-aware-optimizer" in fields:
        kind, note = "used", "adamw: moments in fp32"
        if name == "adamw" and "fp32" not in moments:
            name = "adamw8bit" if moments == {"fp8"} else "adamw_bf16"
            note = f"{name}: moments in {' and '.join(sorted(moments))}"
    fields.tell_given(kind, note, "--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    draft.knobs |= {"optimizer": name} if name not in (None, "adamw") else {}
    if name is None:
        fields.tell_given("not expressed", "optimizer adamw in the estimate", "--optimizer")
    fields.tell_used(f"optimizer {name}", "--optimizer")
    share = fields.data.get("--optimizer-offload-fraction", "1.0")
    if "--optimizer-cpu-offload" in fields:
        if not (isinstance(share, str) and re.fullmatch(r"0?\.\d{1,9}|1(\.0*)?|0(\.0*)?", share)):
            raise fields.invalid("--optimizer-offload-fraction", "it is a share from 0 to 1")
        if float(share):
            draft.add("offload", optimizer=float(share))
    note = "offload: the host holds and steps the share of optimizer states"
    fields.tell_used(note, "--optimizer-cpu-offload", "--optimizer-offload-fraction")
    kept = fields.whole("--cpu-offloading-num-layers", 0)
    fields.tell_given("not expressed", f"activations of {kept} blocks stay on devices", "--cpu-offloading-num-layers")


def _read_shape(fields: Fields, draft: Draft, tensor: int) -> None:
    """The model's shape, if its main sizes are given."""
    shape: dict[str, int] = {}
    for flag, (name, words) in SIZES.items():
        size = fields.whole(flag)
        if size is not None:
            shape[name] = size
            fields.tell(flag, "used", words)
    if not {"layers", "hidden", "heads"} <= shape.keys():
        return
    hidden, gated = shape["hidden"], "--swiglu" in fields or "--quick-geglu" in fields
    ffn = fields.whole("--ffn-hidden-size") or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    if "experts" in shape:
        ffn = fields.whole("--moe-ffn-hidden-size") or ffn
        shape.setdefault("top-k", 2)
    shape["ffn"] = ffn if gated else max(1, 2 * ffn // 3)
    plain = "the estimate has a gated layer of as many parameters, 2/3 as wide"
    width = f"width of the feed-forward layer{'' if gated else f'; {plain}'}"
    fields.tell_used(width, "--ffn-hidden-size", "--moe-ffn-hidden-size")
    fields.tell_used("the feed-forward layer is gated", "--swiglu", "--quick-geglu")
    if not gated:
        fields.tell("--swiglu", "assumed", f"the feed-forward layer is not gated: {plain}")
    is_grouped = "--group-query-attention" in fields
    shape["kv-heads"] = fields.size("--num-query-groups") if is_grouped else shape["heads"]
    fields.tell_used("key and value heads", "--group-query-attention", "--num-query-groups")
    if "--untie-embeddings-and-output-weights" not in fields:
        shape["tied"] = 1
    note = "the head has weights of its own" if "tied" not in shape else "the head has the embedding's weights"
    fields.tell("--untie-embeddings-and-output-weights", "used" if "tied" not in shape else "assumed", note)
    shape["vocab"] = _vocabulary(fields, tensor)
    draft.fields["shape"] = shape


def _vocabulary(fields: Fields, tensor: int) -> int:
    """Rows of the embedding: those of the tokenizer, padded for tensor parallelism."""
    given = fields.whole("--padded-vocab-size") or fields.whole("--vocab-size")
    tokenizer = str(fields.data.get("--tokenizer-type"))
    size = given or VOCABULARIES.get(tokenizer) or _vocabulary_of(fields) or 50257
    multiple = fields.size("--make-vocab-size-divisible-by", 128) * tensor
    rows = -(-size // multiple) * multiple
    note = f"{size:,} tokens, padded to {rows:,}"
    fields.tell_used(note, "--tokenizer-type", "--make-vocab-size-divisible-by")
    fields.tell("--vocab-size", "used" if given else "assumed", note)
    return rows


def _vocabulary_of(fields: Fields) -> int | None:
    """The vocabulary of a model on the Hub that the tokenizer is named after."""
    from atorch.auto.sources import shapes

    named = fields.data.get("--tokenizer-model")
    facts = shapes.known(named) if isinstance(named, str) and is_known(named) else None
    return None if facts is None else int(facts["vocab"])


TARGET = Target("megatron", "Megatron-LM", recognises, read, lacking, write, lambda setup: f"bash {NAME}", TRAITS)
