"""The planner's view of a row of a table of published runs: a shape, a profile, a cost, a cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, plain_cost
from atorch.cost.adapted_profile import Adapters, adapted_profile
from atorch.cost.parallelism import (
    REPLICA_AXES,
    accumulate,
    arrange,
    reductions,
    replicate,
    shard,
    shard_optimizer,
    split_context,
    split_pipeline,
    split_tensor,
)
from atorch.cost.state import Fp8Scaling
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.errors import ArgumentError
from benchmarks.published.adapters import adapters_of
from benchmarks.published.frameworks import Framework
from benchmarks.published.hardware import NODE, cluster_described
from benchmarks.published.layout import Layout, framework_for, layout_of
from benchmarks.published.shapes import shape_of
from benchmarks.published.table import BLANK, Row
from benchmarks.published.words import (
    WRITES_SCORES,
    Precision,
    Recomputation,
    attention_of,
    precision_of,
    recomputation_of,
)


def profile_of(row: Row) -> ModelProfile:
    """The profile of one micro-batch of the run."""
    framework, shape = framework_for(row), shape_of(row)
    multiple = framework.vocab_multiple * layout_of(row).tensor
    padded = replace(shape, vocab=-(-shape.vocab // multiple) * multiple)
    return _profile(padded, _implementation(row, framework), adapters_of(row, framework))


@lru_cache(maxsize=256)
def _profile(shape: TransformerShape, implementation: Implementation, adapters: Adapters | None) -> ModelProfile:
    if adapters is None:
        return transformer_profile(shape, 1, implementation)
    return adapted_profile(shape, adapters, 1, implementation)


def _implementation(row: Row, framework: Framework) -> Implementation:
    """The framework's implementation, with the row's attention kernel and number format."""
    implementation = replace(
        framework.implementation,
        flash_attention=attention_of(row) not in WRITES_SCORES,
        fused_softmax=attention_of(row) != "eager",
        itemsize=2.0 if precision_of(row).is_mixed else 4.0,
    )
    if any(word in f"{row.text('arch')} {row.text('model')}" for word in ("bert", "vit", "bidirectional")):
        implementation = replace(implementation, causal=False)
    if layout_of(row).zero == 3:
        implementation = replace(
            implementation, stream_itemsize=0.0
        )  # embeddings are gathered in 16 bits, and their results are 16-bit too
    is_split = (row.number("tp") or 1) > 1
    if is_split and framework.split_loss_bytes:
        implementation = replace(implementation, loss_bytes=framework.split_loss_bytes)
    if not is_compiled(row):
        return implementation
    if framework.compiles_loss and not is_split:
        implementation = replace(implementation, logit_bytes=2.0, loss_bytes=2.0)
    return replace(implementation, fused_norm=True, fused_activation=True)


def is_compiled(row: Row) -> bool:
    """True if a compiler fuses the operations between products."""
    return row.text("compile") not in (*BLANK, "eager")


COPY_S = 5e-6  # from one launch to the next: `launch_s` of atorch/cluster/known
COMPILED = 0.6  # operators called, relative to transformers' blocks, in compiled models


def cost_of(row: Row) -> Cost:
    """The run as a `Cost` of the planner.

    Raises:
        ArgumentError: the row is refused; its text is the reason.
    """
    layout, framework, shape = layout_of(row), framework_for(row), shape_of(row)
    _agree(layout, shape)
    profile, precision = profile_of(row), precision_of(row)
    if framework.half_grads and precision.dtype == "float16":
        framework = replace(framework, grad_itemsize=2.0, grads_persist=False)
    launches = max(framework.launches, framework.split_launches if layout.tensor > 1 else 0.0)
    cost = arrange(plain_cost(profile, int(layout.global_batch)), _axes(layout))
    cost = replace(
        _mix(cost, framework, precision),
        ops_scale=min(launches, COMPILED) if is_compiled(row) else launches,
        attention_kernel=attention_of(row),
        fp8=_fp8_scaling(framework, precision),
        fp8_once=framework.keeps_fp8,
        fp8_gathers=framework.gathers_fp8,
        adds_in_products=framework.adds_in_products,
        compiled=is_compiled(row),
        hop_wait_s=framework.hop_wait_s,
        scatters_sends=framework.scatters_sends,
        sends_beside=framework.overlaps_sends and layout.interleave > 1,
        tensor_beside=framework.tensor_beside if row.text("tp_overlap") in BLANK else "chunks",
    )
    cost = split_context(split_tensor(cost, splits_norms=layout.splits_norms))
    cost = split_pipeline(
        cost.replace(
            expert=layout.expert,
            expert_capacity=_expert_capacity(row),
            sends_once="deepep" in row.text("arch"),  # DeepEP or HybridEP
        ),
        schedule="interleaved" if layout.interleave > 1 else "1f1b",
        interleave=layout.interleave,
    )
    cost = accumulate(cost, layout.num_micro_batches)
    if framework.recomputes:
        cost = _recompute(cost, recomputation_of(row))
    lost = _waiting_seconds(layout, framework) + _copying_seconds(cost, layout, framework)
    return replace(_data_parallel(cost, layout, framework, precision), extra_s=lost)


def _expert_capacity(row: Row) -> float:
    """The capacity factor that `arch` says, such as "8 experts top-2, capacity factor 1.25"; 0 without one."""
    found = re.search(r"capacity(?:[- _]factor)?[ =:]*(\d+(?:\.\d+)?)", row.text("arch"))
    return float(found[1]) if found else 0.0


def _agree(layout: Layout, shape: TransformerShape) -> None:
    """Refuse a layout that the model cannot have."""
    experts = shape.experts.count if shape.experts else 1
    if experts % layout.expert or layout.expert > layout.devices:
        raise ArgumentError(f"ep {layout.expert} does not divide {experts} experts on {layout.devices} devices")
    if layout.expert > 1 and layout.expert % layout.tensor:
        raise ArgumentError(f"ep {layout.expert} with tp {layout.tensor}: how tensor ranks divide experts is not known")
    for name, degree, whole in (("tp", layout.tensor, shape.hidden), ("cp", layout.context, shape.seq_len)):
        if degree > whole:
            raise ArgumentError(f"{name} {degree} leaves nothing of {whole}")


def _axes(layout: Layout) -> dict[str, int]:
    """Sizes of the mesh axes; data-parallel ranks are divided if only neighbours shard together."""
    zero = layout.shared_by if layout.shared_by < layout.data or layout.zero == 1 else 1
    return {
        "tensor": layout.tensor,
        "context": layout.context,
        "zero": zero,
        "data": layout.data // zero,
        "pipeline": layout.pipeline,
    }


def _waiting_seconds(layout: Layout, framework: Framework) -> float:
    """Seconds of waiting for sends and receives in a step: four a micro-batch on an inner stage, two on an outer.

    The first micro-batch passes the inner stages before the last stage has it, and its gradient passes them again.
    """
    if layout.pipeline == 1 or (layout.devices < 64 * NODE and layout.tensor < 4 * NODE):
        return 0.0
    inner = layout.pipeline - 2
    return framework.send_wait_s * ((4 if inner else 2) * layout.num_micro_batches + 2 * inner)


def _copying_seconds(cost: Cost, layout: Layout, framework: Framework) -> float:
    """Host seconds to launch copies: every rank's piece of every bucket and, after the step, of every parameter.

    The pieces of a bucket, and of all parameters, are laid side by side by rank, and then copied one by one.
    """
    if not framework.copies_by_rank or layout.zero != 1:
        return 0.0
    buckets, parameters = (
        reductions(cost, framework.grad_itemsize, most).calls for most in (framework.bucket_bytes, 0.0)
    )
    return layout.data * ((buckets + parameters) / layout.pipeline + 1) * COPY_S


def _mix(cost: Cost, framework: Framework, precision: Precision) -> Cost:
    """Bytes an element, as the framework mixes precisions; in fp32 nothing is mixed."""
    cost = replace(
        cost,
        dtype="bfloat16" if precision.dtype == "float8" else precision.dtype,  # of everything but 8-bit products
        grads_persist=framework.grads_persist,
        fresh_itemsize=framework.fresh_itemsize,
        placeholder_itemsize=framework.placeholder_itemsize,
        held_gathers=framework.held_at_most,
        step_itemsize=framework.step_itemsize,
        bucket_bytes=framework.buffer_bytes if cost.size("data", "zero") > 1 else 0.0,
        balances_flops=framework.balances_flops,
        optim_itemsize=8.0,
    )
    if not precision.is_mixed:
        return replace(cost, param_itemsize=4.0, grad_itemsize=4.0)
    if framework.keeps_masters:
        return replace(cost, param_itemsize=2.0, grad_itemsize=framework.grad_itemsize, master_itemsize=4.0)
    return replace(cost, param_itemsize=4.0, grad_itemsize=4.0, cast_itemsize=2.0, cast_traffic_bytes=6.0)


def _fp8_scaling(framework: Framework, precision: Precision) -> Fp8Scaling | None:
    """Scaling of 8-bit products; the head and attention are never in 8 bits."""
    if precision.dtype != "float8":
        return None
    if precision.scaling in ("", "tensorwise"):
        return "delayed" if framework.delays_scales else "tensorwise"
    return "blockwise" if precision.scaling == "mx" else precision.scaling


def _recompute(cost: Cost, recomputation: Recomputation) -> Cost:
    """Checkpointing: of whole blocks, of a share of them, or only of operations that are cheap to recompute."""
    if recomputation.what == "nothing":
        return cost
    if recomputation.what == "blocks":
        return replace(cost, recompute=recomputation.share)
    if recomputation.what == "products":
        return replace(cost, recompute=1.0, recompute_keeps="every second")
    return replace(cost, recompute=1.0, recompute_keeps="scores")


def _data_parallel(cost: Cost, layout: Layout, framework: Framework, precision: Precision) -> Cost:
    if layout.zero == 3 or layout.keeps_gathered:
        itemsize = 2.0 if precision.is_mixed else 4.0
        hybrid = layout.shared_by < layout.data
        return shard(
            cost,
            axes=("zero", "context") if hybrid else REPLICA_AXES,
            replicas=("data",) if hybrid else (),
            itemsize=1.0 if precision.gathers_float8 else itemsize,
            reduced_itemsize=2.0 if precision.reduces_16_bits else framework.reduced_itemsize,
            keeps_gathered=layout.keeps_gathered,
            once_a_step=layout.pipeline > 1 and framework.gathers_once_in_pipelines,
            copies="gradients" if framework.gathers_flat else "both",
        )
    if layout.data > 1 and layout.zero < 2:
        cost = replace(cost, bucket_itemsize=framework.bucket_itemsize)
    if layout.zero == 0:
        return replicate(cost, overlaps=framework.overlaps, bucket_bytes=framework.bucket_bytes)
    cost = shard_optimizer(
        cost,
        over=("zero",) if layout.zero == 1 and framework.optimizer_group else REPLICA_AXES,
        reduces="all_reduce" if framework.optimizer_group else "reduce_scatter",
        overlaps=framework.overlaps and not framework.copies_by_rank,
        bucket_bytes=framework.bucket_bytes,
        gathers=framework.gathers,
        gathers_ahead=framework.overlaps_gathers,
    )
    if layout.zero == 2:
        return replace(cost, grad_shards=cost.optim_shards)
    return cost


def cluster_of(row: Row) -> ClusterSpec:
    """The cluster that the run was on, or the nearest one that is known."""
    return cluster_described(
        row.text("hardware"),
        row.number("gpu_mem_gb") or None,
        layout_of(row).devices,
        int(row.number("gpus_per_node") or 0) or None,
    )
