"""Megatron-LM's command line, alone or in a shell script.

Flags and defaults are those of megatron/training/arguments.py and the dataclasses that it makes flags of, at the commit
of `known/megatron.json`. In 16 bits Megatron steps fp32 copies of the weights, as `half` does, and adds gradients up in
fp32 or 16 bits, in the buckets that it reduces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from atorch.trainer_configs.keys import Keys, number, processes, split_launch, tell_rest
from atorch.trainer_configs.megatron.flags import NAME, OPTIMIZERS, SHARDING, SIZES, TRAITS, lacks, write
from atorch.trainer_configs.setup import Draft, Entry, Kind, Target, TrainingSetup
from atorch.trainer_configs.shell import Command, command_of, is_known
from atorch.trainer_configs.source import Fields, Source, options_of

MARKS = frozenset(
    ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers", "--hidden-size", "--seq-length")
    + ("--num-attention-heads", "--micro-batch-size", "--global-batch-size", "--use-distributed-optimizer")
)
WHOLE_LOGITS = "logits are held whole in the estimate"
OWN_CUT = "the cut whose slowest stage is fastest, in the estimate"
EXPERTS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size", "--num-experts")
PLAIN_BLOCKS = "every block is alike in the estimate: attention over all tokens, and one feed-forward layer or experts"
VOCABULARIES: Mapping[str, int] = {
    **{"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "BertWordPieceLowerCase": 30522, "TikTokenizer": 131072},
    **{"BertWordPieceCase": 28996},
}


def recognises(source: Source) -> bool:
    return len(MARKS.intersection(word.partition("=")[0] for word in _words(source)[0].words)) > 1


def _words(source: Source) -> tuple[Command, Mapping[str, tuple[str, ...]]]:
    """The command; of a file that only sets variables, their words."""
    command, variables = command_of(source)
    if source.data or MARKS.intersection(command.words):
        return command, variables
    values = [word for name in variables for text in variables[name] for word in text.split()]
    return (Command(tuple(values), {}), variables) if MARKS.intersection(values) else (command, variables)


def read(source: Source) -> TrainingSetup:
    """See `Target.read`."""
    keys = Keys.of("megatron")
    command, variables = _words(source)
    launcher, _, words = split_launch(command.words)
    alone = {**{name: values[0] for name, values in variables.items() if values}, **command.variables}
    nodes, per_node, entries = processes(launcher, alone)
    options, rest = options_of(words, keys.types["flag"])
    told = "only a run tells what it holds; give the script's arguments: --explain 'bash train.sh 8B …'"
    entries += [Entry(word, None, "assumed", told) for word in rest if not is_known(word)]
    fields = Fields(source.name, options, "", entries)
    draft = Draft(num_nodes=nodes, devices_per_node=per_node, traits=TRAITS)
    tensor = _read_mesh(fields, draft)
    _read_sharding(fields, draft)
    _read_precision(fields, draft)
    _read_gradients(fields, draft)
    _read_recompute(fields, draft)
    _read_batches(fields, draft)
    _read_optimizer(fields, draft)
    _read_shape(fields, draft, tensor)
    return draft.setup(TARGET.name, tell_rest(fields, keys))


def _read_mesh(fields: Fields, draft: Draft) -> int:
    """Add the axes, and return the size of tensor."""
    if "--model-parallel-size" in fields:
        raise fields.invalid("--model-parallel-size", "Megatron has --tensor-model-parallel-size in its place")
    tensor = number(fields, "--tensor-model-parallel-size", default=1) or 1
    draft.split("tensor", tensor, "tensor_parallel")
    by_tokens = tensor > 1 and "--sequence-parallel" in fields
    if by_tokens:
        draft.add("sequence_parallel", mode="megatron")
    context = number(fields, "--context-parallel-size", default=1) or 1
    how = str(fields.data.get("--cp-comm-type", "p2p"))
    if how == "a2a":
        draft.split("sequence", context, "sequence_parallel")
        if context > 1 and by_tokens:
            raise fields.invalid("--cp-comm-type", "beside --sequence-parallel the planner has a ring (p2p) alone")
    else:
        draft.split("context", context, "context_parallel")
    ring, axis = "keys and values pass around a ring", "sequence" if how == "a2a" else "context"
    fields.tell_all({
        "--tensor-model-parallel-size": ("used", f"tensor {tensor}: tensor_parallel" if tensor > 1 else "no split"),
        "--sequence-parallel": ("used", "sequence_parallel (megatron): tokens outside of products are split")
        if by_tokens
        else ("no effect", "Megatron turns it off without tensor parallelism"),
        "--context-parallel-size": ("used", f"{axis} {context}" if context > 1 else "no split"),
        "--cp-comm-type": ("used", "sequence_parallel (ulysses)" if how == "a2a" else ring)
        if how in ("a2a", "p2p") or context == 1
        else ("not expressed", f"{ring} in the estimate"),
        **dict.fromkeys(EXPERTS[:2], _share_experts(fields, draft, tensor)),
    })  # fmt: skip
    _read_pipeline(fields, draft)
    return tensor


def _share_experts(fields: Fields, draft: Draft, tensor: int) -> tuple[Kind, str]:
    """Whole experts on as many processes as Megatron has parts of experts on, if they divide the experts."""
    size, split, count = (number(fields, flag) or 1 for flag in EXPERTS)
    split = split if "--expert-tensor-parallel-size" in fields else tensor
    if size > 1 and count % (size * split):
        return "not expressed", f"{count} experts do not divide by {size} × {split}; they are split as other layers"
    sends_once = "--moe-enable-deepep" in fields or "--moe-flex-dispatcher-backend" in fields
    return draft.share_experts(size * split if size > 1 else 1, **({"dispatcher": "deepep"} if sends_once else {}))


def _read_pipeline(fields: Fields, draft: Draft) -> None:
    stages = number(fields, "--pipeline-model-parallel-size", default=1) or 1
    layers, per_piece = number(fields, "--num-layers"), number(fields, "--num-layers-per-virtual-pipeline-stage")
    pieces = number(fields, "--num-virtual-stages-per-pipeline-rank", default=1) or 1
    if per_piece is not None and layers is not None:
        if layers % (stages * per_piece):
            raise fields.invalid(
                "--num-layers-per-virtual-pipeline-stage", f"{layers} blocks do not divide by it and {stages} stages"
            )
        pieces = layers // (stages * per_piece)
    layout = fields.data.get("--pipeline-model-parallel-layout")
    if isinstance(layout, str) and re.fullmatch(r"[\w|*(),]{1,200}", layout) and "*" not in layout:
        pieces = max(1, (layout.count("|") + 1) // stages)
    config = {"schedule": "interleaved", **({"interleave": pieces} if pieces > 2 else {})} if pieces > 1 else {}
    draft.split("pipeline", stages, "pipeline_parallel", **config)
    draft.set_traits(sends_beside=pieces > 1 and "--no-overlap-p2p-communication" not in fields)
    note = f"pipeline {stages}: stages under 1F1B" if stages > 1 else "no split"
    many = f"{pieces} pieces of the model on a process, interleaved" if stages > 1 else "there is one stage"
    fields.tell_all({
        "--pipeline-model-parallel-size": ("used", note),
        "--num-layers-per-virtual-pipeline-stage": ("used" if layers else "not expressed", many if layers else OWN_CUT),
        "--num-virtual-stages-per-pipeline-rank": ("used", many),
        "--pipeline-model-parallel-layout": ("not expressed", f"{many}; {OWN_CUT}"),
    })  # fmt: skip


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
        fields.tell(
            "--use-torch-fsdp2", "used", f"{name}: {'gathered weights are kept' if keeps else 'all is sharded'}"
        )
    if name != "ddp":
        draft.add(name)
    note = "zero1: optimizer states are sharded" if name == "zero1" else f"{name} shards them"
    fields.tell_all({
        "--use-distributed-optimizer": ("used", note),
        "--data-parallel-sharding-strategy": ("used" if sharded else "no effect", name),
        "--torch-fsdp2-no-reshard-after-forward": ("used", "zero2: gathered weights are kept for backward"),
    })  # fmt: skip
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
    note = f"fp8 {form}: products of blocks in 8 bits"
    fields.tell_all(dict.fromkeys(("--fp8-format", "--fp8", "--fp8-hybrid", "--fp8-e4m3"), ("used", note)))
    delayed = fields.data.get("--fp8-recipe", "delayed") == "delayed"
    recipe: tuple[Kind, str] = ("used", "scales are delayed") if delayed else ("not expressed", "scales of a tensor")
    fields.tell_all({"--fp8-recipe": recipe})
    old = "--use-flash-attn" in fields
    backend = fields.data.get("--attention-backend", "flash" if old else "auto")
    if backend in ("unfused", "local"):
        draft.fields["knobs"]["attention"] = "eager"
    scores = "attention eager: scores are written" if backend in ("unfused", "local") else "scores are not kept"
    fields.tell_all({"--attention-backend": ("used", scores), "--use-flash-attn": ("used", scores)})


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
    fields.tell_all(dict.fromkeys(flags, ("used", note)))
    fields.tell_all({"--no-gradient-accumulation-fusion": ("used", "gradients are added by operations of their own")})
    fields.tell_all({"--hidden-dropout": ("used", "masks of dropout are kept" if drops else "no dropout")})


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
    count = number(fields, "--recompute-num-layers") or number(fields, "--activations-checkpoint-num-layers")
    if how == "full":
        every = method != "block" or count is None
        stages = draft.fields["axes"].get("pipeline", 1)
        draft.add("checkpoint", **({} if every else {"max_checkpoint_module_num": count * stages}))
    note = (
        "checkpoint: blocks are recomputed" if how == "full" else "attention's scores are recomputed, as fused ones are"
    )
    blocks = f"checkpoint: {count or 1} blocks of a stage" if method == "block" else "checkpoint: all blocks"
    uniform: tuple[Kind, str] = ("used", blocks)
    if how == "full" and method != "block" and (count or 1) > 1:
        uniform = ("not expressed", f"inputs of every block are kept in the estimate, not of every {count}")
    fields.tell_all({
        "--recompute-granularity": ("used", note),
        **dict.fromkeys(("--recompute-activations", "--checkpoint-activations"), ("used", note)),
        **dict.fromkeys(("--recompute-method", "--activations-checkpoint-method"), ("used", blocks)),
        **dict.fromkeys(("--recompute-num-layers", "--activations-checkpoint-num-layers"), uniform),
    })  # fmt: skip
    modules = fields.data.get("--recompute-modules")
    more = set(modules if isinstance(modules, list) else [modules]) - {None, "core_attn"}
    kind: Kind = "not expressed" if more and how == "selective" else "no effect"
    fields.tell_all({"--recompute-modules": (kind, "only attention's scores are recomputed in the estimate")})


def _read_batches(fields: Fields, draft: Draft) -> None:
    if "--batch-size" in fields:
        raise fields.invalid("--batch-size", "Megatron has --micro-batch-size in its place")
    micro, total = number(fields, "--micro-batch-size"), number(fields, "--global-batch-size")
    draft.fields |= {"micro_batch": micro, "global_batch": total, "seq": number(fields, "--seq-length")}
    if micro is not None and total is None:
        draft.fields["accumulation"] = 1
        fields.tell("--global-batch-size", "assumed", "one micro-batch a step, Megatron's default")
    fields.tell_all({
        "--micro-batch-size": ("used", "samples of a micro-batch"),
        "--global-batch-size": ("used", "samples of a step on all devices"),
        "--seq-length": ("used", "tokens of a sample"),
    })  # fmt: skip


def _read_optimizer(fields: Fields, draft: Draft) -> None:
    kind = fields.data.get("--optimizer", "adam")
    name = OPTIMIZERS.get(str(kind))
    known: Kind = "used" if name else "not expressed"
    moments = {str(fields.data.get(flag, "fp32")) for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")}
    aware = "--use-precision-aware-optimizer" in fields
    note = "adamw: moments in fp32"
    if name == "adamw" and aware and "fp32" not in moments:
        name = "adamw8bit" if moments == {"fp8"} else "adamw_bf16"
        note = f"{name}: moments in {' and '.join(sorted(moments))}"
    flags = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    fields.tell_all(dict.fromkeys(flags, ("used", note) if aware else ("no effect", "the optimizer does not read it")))
    draft.fields["knobs"] |= {"optimizer": name} if name not in (None, "adamw") else {}
    fields.tell_all({"--optimizer": (known, f"optimizer {name or 'adamw'}{'' if name else ' in the estimate'}")})
    share = fields.data.get("--optimizer-offload-fraction", "1.0")
    if "--optimizer-cpu-offload" in fields:
        if not (isinstance(share, str) and re.fullmatch(r"0?\.\d{1,9}|1(\.0*)?|0(\.0*)?", share)):
            raise fields.invalid("--optimizer-offload-fraction", "it is a share from 0 to 1")
        if float(share):
            draft.add("offload", optimizer=float(share))
    note = "offload: the host holds and steps the share of optimizer states"
    fields.tell_all(dict.fromkeys(("--optimizer-cpu-offload", "--optimizer-offload-fraction"), ("used", note)))
    kept = number(fields, "--cpu-offloading-num-layers", 0)
    fields.tell_all({"--cpu-offloading-num-layers": ("not expressed", f"activations of {kept} blocks stay on devices")})


def _read_shape(fields: Fields, draft: Draft, tensor: int) -> None:
    """The model's shape, if its main sizes are given."""
    shape: dict[str, int] = {}
    for flag, (name, words) in SIZES.items():
        size = number(fields, flag)
        if size is not None:
            shape[name] = size
            fields.tell(flag, "used", words)
    if not {"layers", "hidden", "heads"} <= shape.keys():
        return
    hidden, gated = shape["hidden"], "--swiglu" in fields or "--quick-geglu" in fields
    ffn = number(fields, "--ffn-hidden-size") or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    if "experts" in shape:
        ffn = number(fields, "--moe-ffn-hidden-size") or ffn
        shape.setdefault("top-k", 2)
    shape["ffn"] = ffn if gated else max(1, 2 * ffn // 3)
    plain = "the estimate has a gated layer of as many parameters, 2/3 as wide"
    width = f"width of the feed-forward layer{'' if gated else f'; {plain}'}"
    fields.tell_all(dict.fromkeys(("--ffn-hidden-size", "--moe-ffn-hidden-size"), ("used", width)))
    fields.tell_all({"--swiglu": ("used", "the feed-forward layer is gated"), "--quick-geglu": ("used", "it is gated")})
    if not gated:
        fields.tell("--swiglu", "assumed", f"the feed-forward layer is not gated: {plain}")
    groups = number(fields, "--num-query-groups", default=1) if "--group-query-attention" in fields else shape["heads"]
    shape["kv-heads"] = groups or 1
    fields.tell_all(dict.fromkeys(("--group-query-attention", "--num-query-groups"), ("used", "key and value heads")))
    if "--untie-embeddings-and-output-weights" not in fields:
        shape["tied"] = 1
    note = "the head has weights of its own" if "tied" not in shape else "the head has the embedding's weights"
    fields.tell("--untie-embeddings-and-output-weights", "used" if "tied" not in shape else "assumed", note)
    shape["vocab"] = _vocabulary(fields, tensor)
    draft.fields["shape"] = shape


def _vocabulary(fields: Fields, tensor: int) -> int:
    """Rows of the embedding: those of the tokenizer, padded for tensor parallelism."""
    given = number(fields, "--padded-vocab-size") or number(fields, "--vocab-size")
    tokenizer = str(fields.data.get("--tokenizer-type"))
    size = given or VOCABULARIES.get(tokenizer) or _vocabulary_of(fields) or 50257
    multiple = (number(fields, "--make-vocab-size-divisible-by", default=128) or 128) * tensor
    rows = -(-size // multiple) * multiple
    note = f"{size:,} tokens, padded to {rows:,}"
    fields.tell_all({"--tokenizer-type": ("used", note), "--make-vocab-size-divisible-by": ("used", note)})
    fields.tell("--vocab-size", "used" if given else "assumed", note)
    return rows


def _vocabulary_of(fields: Fields) -> int | None:
    """The vocabulary of a model on the Hub that the tokenizer is named after."""
    from atorch.auto.sources import shapes

    named = fields.data.get("--tokenizer-model")
    facts = shapes.known(named) if isinstance(named, str) and is_known(named) else None
    return None if facts is None else int(facts["vocab"])


TARGET = Target(
    name="megatron",
    title="Megatron-LM",
    recognises=recognises,
    read=read,
    lacks=lacks,
    write=write,
    command=lambda setup: f"bash {NAME}",
    traits=TRAITS,
)
