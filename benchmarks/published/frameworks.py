"""Differences between frameworks, in the terms of the planner's state: mixed precision, buffers, overlap.

An unknown framework gets the traits of most: 16-bit parameters with fp32 masters and fused kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atorch.cost.parallelism import Gathers
from atorch.cost.state import Beside
from atorch.cost.transformer import Implementation
from atorch.units import MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Traits of a framework in mixed precision."""

    implementation: Implementation = Implementation()
    keeps_masters: bool = True  # 16-bit parameters beside fp32 masters; else fp32 parameters that are cast for use
    grad_itemsize: float = 4.0
    grads_persist: bool = True  # gradients keep their memory between steps
    half_grads: bool = False  # fp16 gradients stay as autograd makes them, and are freed after a step
    fresh_itemsize: float = 0.0  # of gradients that are added only after backward
    buffer_bytes: float = 0.0  # of communication, for any model
    bucket_itemsize: float = 0.0  # of communication buffers for all gradients, with several replicas
    placeholder_itemsize: float = 0.0
    split_loss_bytes: float = 0.0  # as loss_bytes, where logits are split over tensor ranks
    compiles_loss: bool = False  # with the model: logits in 16 bits are kept, and their gradient is made from them
    held_at_most: float = 0.0  # inputs of a block that are kept gathered by some versions: what fits has room for it
    held_without_pipelines: float = 0.0  # by most runs
    gathers_flat: bool = False  # into flat buffers with parameters as views, as FSDP1 does
    search_tokens: int = 0  # of a sample in the example of its search, whose rows have its method names
    step_itemsize: float = 0.0
    zero_when_split: int = 0  # default level of ZeRO under tensor or pipeline parallelism
    split_by: str = ""  # the framework that does its tensor and pipeline parallelism
    reduced_itemsize: float = 4.0  # of sent gradients of sharded parameters, in mixed precision
    frozen_itemsize: float = 2.0  # of frozen parameters, with adapters
    reports_first: bool = False  # logs the memory of the first device
    balances_flops: bool = False  # of pipeline stages
    overlaps: bool = True  # reductions run behind backward
    bucket_bytes: float = 25 * MiB  # of gradients that are reduced together
    optimizer_group: int = 0  # neighbours that shard the optimizer's state under ZeRO-1; 0 for all
    gathers: Gathers = "all_gather"  # of stepped parameters
    hop_wait_s: float = 0.0  # of a collective in a pipeline over nodes, while sends and receives keep the device busy
    send_wait_s: float = 0.0  # of every send and receipt of a stage, on 64 nodes and where tensor ranks are on four
    scatters_sends: bool = False  # every tensor rank sends its share to the next stage, where they are gathered
    cuts_by_stages: bool = False  # by default, as many micro-batches as pipeline stages
    gathers_once_in_pipelines: bool = False  # sharded parameters, for all micro-batches; gradients are reduced once
    tensor_beside: Beside = "nothing"
    overlaps_sends: bool = False  # of interleaved pipelines
    overlaps_gathers: bool = False  # of stepped parameters, behind the next forward pass
    adds_in_products: bool = False
    keeps_fp8: bool = False  # weights in 8 bits are kept over a step's micro-batches
    gathers_fp8: bool = False  # inputs of 8-bit products, under tensor parallelism
    splits_norms: bool = False  # default of sequence parallelism with tensor parallelism
    vocab_multiple: int = 1  # of tensor ranks, to which vocabularies are padded
    recomputes: bool = True  # as its table says
    delays_scales: bool = False  # those of 8-bit products, as transformer-engine's first recipe does
    copies_by_rank: bool = False  # ZeRO's pieces, by parameter and rank; computing waits for them
    split_launches: float = 0.0  # minimum of `launches` under tensor parallelism
    launches: float = 2.0  # operators called, relative to transformers' blocks


# Probabilities in fp32; the logits, then their gradient, in 16 bits.
_MEGATRON = Implementation(loss_bytes=2.0)
# The sum of two copies in fp32, one of which is kept as probabilities.
# Queries, keys and values are permuted, keys and values joined and permuted again, the result transposed: 8 tensors in
# forward, and in backward, with gradients stacked and made contiguous, 9 (CausalSelfAttention in models/llama.py).
_NANOTRON = Implementation(loss_bytes=4.0, fused_activation=False, copied=6.8)
# A cross entropy that writes its gradient over the logits.
_FUSED_LOSS = Implementation(logit_bytes=2.0, loss_bytes=2.0)
_UNFUSED = Implementation(fused_norm=False, fused_activation=False)
# Besides the probabilities: logits in fp32, returned, their shifted copy, and those of the step before; or two
# gradients. Autocast leaves embeddings, norms and sums in the fp32 of their parameters, and so the stream, unless
# parameters are gathered in 16 bits.
_HUGGING_FACE = Implementation(fused_norm=False, fused_activation=False, loss_bytes=12.0, stream_itemsize=4.0)

# Norms and gates operation by operation unless compiled; a product for each of q, k, v, w1 and w3, which counts where
# every second one runs again (`torchtitan/models/llama/model.py`).
# Plain `F.cross_entropy` of logits in fp32 keeps their log-softmax, and makes of it the gradients of both its steps. Of
# split logits DTensor's has four tensors at once (torch/distributed/tensor/parallel/loss.py, in backward).
_TORCHTITAN = Framework(
    implementation=Implementation(fused_norm=False, fused_activation=False, fused_projections=False, loss_bytes=8.0),
    split_loss_bytes=12.0,
    keeps_masters=False,
    grads_persist=False,
    cuts_by_stages=True,
    gathers_once_in_pipelines=True,
)

# Megatron-Core. Gradients are added to in the products that make them, unless `--no-gradient-accumulation-fusion`, and
# what tensor ranks sum in backward runs beside these (megatron/core/tensor_parallel/layers.py; Transformer Engine's
# linear layers do both, too, and gather their inputs in 8 bits). Layers cast weights to 8 bits in a step's first
# micro-batch (`is_first_microbatch`, megatron/core/extensions/transformer_engine.py). Interleaved pipelines send during
# computation, unless `--no-overlap-p2p-communication`.
_MEGATRON_CORE = Framework(
    implementation=_MEGATRON,
    delays_scales=True,
    vocab_multiple=128,
    placeholder_itemsize=2.0,
    scatters_sends=True,
    tensor_beside="weights",
    overlaps_sends=True,
    adds_in_products=True,
    keeps_fp8=True,
    gathers_fp8=True,
)
# Recipes of NeMo and Megatron Bridge have sequence_parallel, use_distributed_optimizer, overlap_param_gather and
# tp_comm_overlap on, and grad_reduce_in_fp32 off in mixed precision (NVIDIA/NeMo, nemo/collections/llm/recipes).
_MEGATRON_RECIPES = replace(
    _MEGATRON_CORE,
    grad_itemsize=2.0,
    tensor_beside="both",
    overlaps_gathers=True,
    splits_norms=True,
    zero_when_split=1,
)
# 16-bit gradients without `--accumulate-allreduce-grads-in-fp32`, which bf16 alone sets (megatron/arguments.py).
_MEGATRON_2021 = Framework(
    implementation=Implementation(dropout=True),
    grad_itemsize=2.0,
    overlaps=False,
    scatters_sends=True,
    vocab_multiple=128,
)

_MEGATRON_DEEPSPEED = Framework(
    implementation=Implementation(dropout=True),
    overlaps=False,
    scatters_sends=True,
    vocab_multiple=128,
    half_grads=True,  # `zero_grad` of FP16_Optimizer (deepspeed/runtime/fp16/fused_optimizer.py)
)

_KNOWN: Mapping[str, Framework] = {
    # A part of the name in lower case; the first match counts.
    "nanotron": Framework(
        implementation=_NANOTRON,
        fresh_itemsize=2.0,
        bucket_itemsize=2.0,
        balances_flops=True,
        # Of attention and of the feed-forward layer, unless `tp_recompute_allgather` is on, as it is by default in the
        # version of February 2025 (src/nanotron/parallel/tensor_parallel/functional.py) and was not in all runs.
        held_at_most=2.0,
        held_without_pipelines=2.0,
        reports_first=True,
        # Its source has 25 of gradients in 16 bits, reduced in fp32 (`ddp_bucket_cap_mb`, config/config.py); as many
        # rings over 64 and more ranks would take longer than whole steps took.
        bucket_bytes=512 * MiB,
        # Launches go through one queue (`CUDA_DEVICE_MAX_CONNECTIONS=1` in run_multinode.sh). What copies a scattered
        # bucket to its place (`update_output`, `all_gather_coalesced` and `reduce_scatter_coalesced` in distributed.py)
        # waits there for the collective, and what comes after it, too; an all-reduce is in place and has no such copy.
        tensor_beside="weights",  # `tp_linear_async_communication` (examples/config_tiny_llama_bench.yaml)
        gathers="at once",  # `_all_gather_params` in optim/zero.py
        copies_by_rank=True,
        # Calls of torch's operators in a block, counted: 181 and 10 collectives for the 120 without tensor parallelism.
        split_launches=3.0,
        hop_wait_s=2.8e-4,
        # Before every tensor go two messages of its shape, which the host waits for. The figure is the median over the
        # runs of the 1B model on 512 devices; on fewer some runs lose it, others do not; with 32 tensor ranks all do.
        send_wait_s=0.26,
        launches=2.6,
    ),
    "automodel": Framework(keeps_masters=False, grads_persist=False),
    "nemo": _MEGATRON_RECIPES,
    "bridge": _MEGATRON_RECIPES,
    # vTrain's runs. What its table has as checkpointing is a flag of its simulator, which recomputes nothing on a last
    # stage (`src/predictor.py`); measured layers take as long on one stage as on two and four, and less than
    # recomputing would at the rates of Megatron's own largest runs: benchmarks/README.md, "vTrain".
    "megatron-deepspeed (per paper)": replace(_MEGATRON_DEEPSPEED, recomputes=False),
    "megatron-deepspeed": _MEGATRON_DEEPSPEED,
    "megatron-lm (may 2021)": _MEGATRON_2021,
    "megatron-lm (2021)": _MEGATRON_2021,
    # Sums of backward beside weights' gradients; accumulation is fused for fp32 gradients alone (02bb1f5c).
    "megatron-lm (2022)": replace(_MEGATRON_2021, tensor_beside="weights"),
    "megatron": _MEGATRON_CORE,
    "internevo": Framework(
        grad_itemsize=2.0,
        grads_persist=False,
        step_itemsize=12.0,
        bucket_bytes=512 * MiB,
        gathers="broadcast",  # of every rank
        optimizer_group=8,
    ),
    "oneflow": Framework(implementation=Implementation(dropout=True), keeps_masters=False),
    "composer": Framework(
        implementation=_FUSED_LOSS, keeps_masters=False, grads_persist=False, delays_scales=True, gathers_flat=True
    ),
    # Its autocast is PyTorch's, beside which DDP has buckets for all gradients in fp32. Where it finds FSDP beside
    # autocast, it has FSDP gather, compute and reduce in 16 bits ("turn on mixed_precision in FSDP" in
    # atorch/auto/model_context.py of intelligent-machine-learning/dlrover, at 3a442b728, when its runs were measured).
    "atorch": Framework(
        # Its examples checkpoint by wrapping layers, which leaves `use_cache` of transformers' models on: outputs hold
        # keys and values. A loop holds the last step's until the next forward pass has returned (fsdp_llama2.py).
        implementation=replace(_HUGGING_FACE, cached_passes=2.0),
        bucket_itemsize=4.0,
        keeps_masters=False,
        grads_persist=False,
        reduced_itemsize=2.0,
        frozen_itemsize=4.0,  # what `from_config` makes, and shards of it stay
        search_tokens=2048,  # bayes_opt_sg_llama2_entry.sh; its other examples have 4,096
        gathers_flat=True,
        split_by="deepspeed",
    ),
    # Its buckets of 5e8 elements, one to reduce and one to gather.
    "deepspeed": Framework(implementation=_UNFUSED, grad_itemsize=2.0, zero_when_split=1, buffer_bytes=2e9),
    # In `parallelisms/pipelining_utils.py` and `parallelize_llama.py` of 2024, and torch's `pipelining/stage.py`, which
    # neither shards again nor reduces before the last micro-batch's backward. Its loss is compiled again since April
    # 2025 (bbb1b616e); before, that was off (`train.py` at 9dec370, `components/loss.py` of version 0.0.2).
    "torchtitan 9dec370": _TORCHTITAN,
    "torchtitan 0.0": _TORCHTITAN,
    "torchtitan": replace(_TORCHTITAN, compiles_loss=True),
    "transformers": Framework(implementation=_HUGGING_FACE, keeps_masters=False, grads_persist=False),
}


READ_OFF: Mapping[str, Mapping[str, float | bool]] = {
    # Traits that were read off published runs, with their values by the framework's source alone, for estimates of a
    # held-out source.
    "nanotron": {
        "hop_wait_s": 0.0, "send_wait_s": 0.0, "launches": 2.0, "held_without_pipelines": 0.0, "bucket_bytes": 50 * MiB
    },
}  # fmt: skip


def framework_of(name: str, *, is_split: bool = False, knows_runs: bool = True) -> Framework:
    """The framework that a table names, or the one it delegates to if the model `is_split` over devices.

    Without `knows_runs`, traits that were read off published runs have the values of the framework's source.
    """
    found = next((part for part in _KNOWN if part in name.lower()), "")
    if is_split and found and _KNOWN[found].split_by:
        found = _KNOWN[found].split_by
    framework = _KNOWN.get(found, Framework())
    return framework if knows_runs else replace(framework, **READ_OFF.get(found, {}))
