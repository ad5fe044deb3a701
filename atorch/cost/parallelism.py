"""The effect of each parallelism on a cost. All methods that fold costs share these functions.

A split along tensor, sequence, context, expert or pipeline is a field of the cost. `time` derives from it the
communication of every micro-batch, so later changes of recomputation or precision are included. The communication of
replicas and of sharded parameters depends on buckets, blocks and dtypes: the cost lists it as `Comm`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from atorch.cost.comm.buckets import Reductions, deal_out, num_sliced_buckets, reductions
from atorch.cost.profile import Segment
from atorch.cost.state import Comm, Cost
from atorch.units import MiB

AXES = ("tensor", "sequence", "context", "zero", "data", "pipeline")
"""The usual order of ranks, the fastest-varying first."""
BATCH_AXES = ("data", "zero")
"""Axes whose ranks see different samples, in the order that hybrid sharding needs: replicas, then shards."""
REPLICA_AXES = ("data", "zero", "sequence", "context")
"""Axes whose ranks hold the same parameters and see different tokens: gradients are summed over them."""


def arrange(cost: Cost, sizes: Mapping[str, int]) -> Cost:
    """Arrange ranks along `AXES` in their usual order; the axes of different samples divide the batch."""
    cost = cost.but(axes={name: sizes[name] for name in AXES if sizes.get(name, 1) > 1})
    return cost.but(batch_size=cost.batch_size / cost.size(*BATCH_AXES))


def split_tensor(cost: Cost, *, splits_norms: bool = False) -> Cost:
    """Split products by columns and rows over the tensor axis; with `splits_norms` split the rest by tokens.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.
    """
    return cost.but(tensor=cost.size("tensor"), splits_norms=splits_norms and cost.size("tensor") > 1)


def split_sequence(cost: Cost) -> Cost:
    """Split tokens over the sequence axis, heads inside attention: Jacobs et al. 2023, arXiv 2309.14509, section 3."""
    return cost.but(sequence=cost.size("sequence"))


def split_context(cost: Cost) -> Cost:
    """Split tokens over the context axis, keys and values in a ring: Liu et al. 2023, arXiv 2310.01889, section 3."""
    return cost.but(context=cost.size("context"))


def whole_outside(cost: Cost) -> Cost:
    """Outside of blocks, tensor ranks have all tokens; sequence and context ranks have their own.

    They have all tokens, too, if the loss is not a cross entropy and so needs full logits, or with a pipeline.
    """
    has_losses = any(segment.num_losses for segment in cost.segments)
    return cost.but(whole_outside=True, own_tokens=has_losses and cost.size("pipeline") == 1)


def split_pipeline(
    cost: Cost, *, schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b", interleave: int = 1
) -> Cost:
    """Split blocks over the pipeline axis, with `interleave` pieces of the model on each rank."""
    return cost.but(stages=cost.size("pipeline"), schedule=schedule, interleave=interleave)


def accumulate(cost: Cost, num_micro_batches: float) -> Cost:
    """Divide a step into micro-batches whose gradients are summed."""
    return cost.but(num_micro_batches=float(num_micro_batches))


def replicate(
    cost: Cost,
    *,
    axes: tuple[str, ...] = REPLICA_AXES,
    itemsize: float | None = None,
    bucket_bytes: float = 25 * MiB,
    overlaps: bool = True,
) -> Cost:
    """All-reduce gradients once a step in buckets; backward can hide all but the last.

    Li et al. 2020, arXiv 2006.15704, section 3.2. `itemsize` is that of the payload; by default that of gradients.
    """
    return cost.send(_reduction(cost, "all_reduce", axes, itemsize, bucket_bytes, overlaps))


Gathers = Literal["all_gather", "at once", "broadcast", "sliced"]


def shard_optimizer(
    cost: Cost,
    *,
    axes: tuple[str, ...] = REPLICA_AXES,
    over: tuple[str, ...] = REPLICA_AXES,
    itemsize: float | None = None,
    bucket_bytes: float = 25 * MiB,
    overlaps: bool = True,
    reduces: Literal["all_reduce", "reduce_scatter"] = "reduce_scatter",
    gathers: Gathers = "all_gather",
    gathers_ahead: bool = False,
) -> Cost:
    """Shard optimizer state: reduce gradients to their owners, and gather parameters from them after the update.

    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Gradients are reduced over `axes`, the state is sharded
    `over` as many or fewer of them. Owners of whole parameters "broadcast" them. Slices are gathered in the gradients'
    buckets ("all_gather"), in buckets of their own ("sliced", `buckets.sliced_buckets`), or all "at once". With
    `gathers_ahead` the next forward pass waits for the first bucket alone.
    """
    shards = cost.size(*over)
    stepped = cost.num_trainable * cost.param_itemsize / cost.param_shards
    calls, share = stepped / bucket_bytes + 1, 1 / shards
    if gathers == "broadcast":
        calls, share = deal_out(cost, shards)
    elif gathers != "all_gather":
        calls, gathers = num_sliced_buckets(cost) if gathers == "sliced" else 1.0, "all_gather"
    return cost.but(optim_shards=cost.optim_shards / share).send(
        _reduction(cost, reduces, axes, itemsize, bucket_bytes, overlaps),
        Comm(gathers, over, stepped, count=calls, overlap=1.0 - 1.0 / calls if gathers_ahead else 0.0),
    )


def shard(
    cost: Cost,
    *,
    axes: tuple[str, ...] = REPLICA_AXES,
    itemsize: float = 2.0,
    reduced_itemsize: float = 4.0,
    keeps_gathered: bool = False,
    once_a_step: bool = False,
    replicas: tuple[str, ...] = (),
    overlap: float = 0.8,
    copies: Literal["both", "gradients", "nothing"] = "both",
) -> Cost:
    """Shard parameters, gradients and optimizer state; gather each block before it computes, reduce-scatter after.

    Zhao et al. 2023, arXiv 2304.11277. This happens in every micro-batch, or `once_a_step`: then parameters stay
    gathered over a step's micro-batches, and gradients full. Blocks are gathered again in backward unless
    `keeps_gathered`. Shards of gradients are all-reduced over `replicas`. FSDP2 copies parameters out of the gathered
    buffer, and gradients into another (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). FSDP1's parameters
    are views of the gathered buffer, so it copies gradients alone.
    """
    shards, around = cost.size(*axes), _num_groups_around(cost.segments)
    calls = float(cost.num_blocks + around)
    keeps_gathered = keeps_gathered or once_a_step
    regathers = 0.0 if keeps_gathered else float(cost.num_blocks)  # torch keeps the root's group gathered
    trained = tuple(segment for segment in cost.segments if segment.num_trainable)
    reductions = float(sum(segment.count for segment in trained if segment.is_block) + _num_groups_around(trained))
    gathered = sum(
        segment.count * (2.0 if segment.is_block and not keeps_gathered else 1.0) * cost.local_params(segment)
        * segment.sent_itemsize(itemsize)
        for segment in cost.segments
    )  # fmt: skip
    trainable = cost.num_trainable
    reduced = reduced_itemsize * trainable
    out = 2.0 * gathered if copies == "both" else 0.0
    into = 0.0 if copies == "nothing" else reduced + itemsize * trainable
    return cost.but(
        param_shards=cost.param_shards * shards,
        grad_shards=cost.grad_shards * (1.0 if once_a_step else shards),
        optim_shards=cost.optim_shards * shards,
        gathered_itemsize=itemsize,
        keeps_gathered=keeps_gathered,
        whole_grads=once_a_step,
        cast_itemsize=0.0,  # shards are cast before the gather
        cast_traffic_bytes=cost.cast_traffic_bytes / shards,
    ).send(
        Comm("all_gather", axes, gathered, calls + regathers, overlap, each_micro_batch=not once_a_step, copied=out),
        Comm("reduce_scatter", axes, reduced, reductions, overlap, each_micro_batch=not once_a_step, copied=into),
        Comm("all_reduce", replicas, reduced / shards, reductions, overlap, each_micro_batch=not once_a_step),
    )


def _num_groups_around(segments: tuple[Segment, ...]) -> int:
    """The number of FSDP groups outside of blocks: embeddings, an untied head, and the root with the rest."""
    tables = head = rest = False
    for part in (segment for segment in segments if not segment.is_block):
        largest = max((product.inner * product.columns for product in part.matmuls), default=0)
        weight = largest if 0 < largest <= part.num_params else 0
        tables |= not part.matmuls and part.num_params > 0
        head |= weight > 0
        rest |= bool(part.matmuls) and part.num_params > weight
    return tables + head + rest


def share_buffers(cost: Cost, axes: tuple[str, ...] = REPLICA_AXES) -> Cost:
    """Broadcast buffers from the first replica before the first forward pass of a step."""
    return cost.send(Comm("broadcast", axes, cost.buffer_bytes)) if cost.buffer_bytes else cost


def _reduction(
    cost: Cost,
    kind: Literal["all_reduce", "reduce_scatter"],
    axes: tuple[str, ...],
    itemsize: float | None,
    bucket_bytes: float,
    overlaps: bool,
) -> Comm:
    itemsize, trainable = cost.grad_itemsize if itemsize is None else itemsize, cost.num_trainable
    num_bytes = trainable * itemsize / cost.grad_shards
    reduced = reductions(cost, num_bytes / trainable, bucket_bytes) if num_bytes else Reductions(1, 1.0)
    return Comm(kind, axes, num_bytes, count=reduced.calls, overlap=1 - reduced.last_share if overlaps else 0.0)
