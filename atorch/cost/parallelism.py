"""The effect of each parallelism on a cost. All methods that fold costs share these functions.

A split along tensor, sequence, context, expert or pipeline is a field of the cost. `time` derives from it the
communication of every micro-batch, so later changes of recomputation or precision are included. The communication of
replicas and of sharded parameters depends on buckets, blocks and dtypes: the cost lists it as `Comm`s.

Numbers of buckets follow from the shapes in a profile. The parameter that fills a bucket closes it (Li et al. 2020,
arXiv 2006.15704, section 3.2.3), and no parameter is split over buckets. So for weights as large as a bucket the number
of calls is not bytes over bucket size.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from atorch.cost.profile import Segment
from atorch.cost.state import Comm, Cost
from atorch.units import MiB

AXES = ("tensor", "sequence", "context", "zero", "data", "pipeline")
"""The usual order of ranks, the fastest-varying first."""
AXIS_ALIASES: Mapping[str, str] = {"pipe": "pipeline"}
BATCH_AXES = ("data", "zero")
"""Axes whose ranks see different samples, in the order that hybrid sharding needs: replicas, then shards."""
EXPERT_AXIS = "expert"
"""Not an axis of the mesh: the ranks that share experts. After axes of the mesh: those that hold the same experts."""
REPLICA_AXES = ("data", "zero", "sequence", "context")
"""Axes whose ranks hold the same parameters and see different tokens: gradients are summed over them."""


def arrange(cost: Cost, sizes: Mapping[str, int]) -> Cost:
    """Arrange ranks along `AXES` in their usual order; the axes of different samples divide the batch."""
    cost = cost.replace(axes={name: sizes[name] for name in AXES if sizes.get(name, 1) > 1})
    return cost.replace(batch_size=cost.batch_size / cost.size(*BATCH_AXES))


def split_tensor(cost: Cost, *, splits_norms: bool = False) -> Cost:
    """Split matmuls by columns and rows over the tensor axis; with `splits_norms` split the rest by tokens.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.
    """
    return cost.replace(tensor=cost.size("tensor"), splits_norms=splits_norms and cost.size("tensor") > 1)


def split_sequence(cost: Cost) -> Cost:
    """Split tokens over the sequence axis, heads inside attention: Jacobs et al. 2023, arXiv 2309.14509, section 3."""
    return cost.replace(sequence=cost.size("sequence"))


def split_context(cost: Cost) -> Cost:
    """Split tokens over the context axis, keys and values in a ring: Liu et al. 2023, arXiv 2310.01889, section 3."""
    return cost.replace(context=cost.size("context"))


def whole_outside(cost: Cost) -> Cost:
    """Outside of blocks, tensor ranks have all tokens; sequence and context ranks have their own.

    They have all tokens, too, if the loss is not a cross entropy and so needs full logits, or with a pipeline.
    """
    has_losses = any(segment.num_losses for segment in cost.segments)
    return cost.replace(whole_outside=True, own_tokens=has_losses and cost.size("pipeline") == 1)


def split_pipeline(
    cost: Cost, *, schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b", interleave: int = 1
) -> Cost:
    """Split blocks over the pipeline axis, with `interleave` pieces of the model on each rank."""
    return cost.replace(stages=cost.size("pipeline"), schedule=schedule, interleave=interleave)


def accumulate(cost: Cost, num_micro_batches: float) -> Cost:
    """Divide a step into micro-batches whose gradients are summed."""
    return cost.replace(num_micro_batches=float(num_micro_batches))


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
    return _send(cost, _reduction(cost, "all_reduce", axes, itemsize, bucket_bytes, overlaps))


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
    per_micro_batch: bool = False,
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
    return _send(
        cost.replace(optim_shards=cost.optim_shards / share),
        _reduction(cost, reduces, axes, itemsize, bucket_bytes, overlaps, per_micro_batch),
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
    are views of the gathered buffer, so it copies gradients alone. Weights of 8-bit matmuls may be gathered in 8 bits
    (`Cost.fp8_sent`). With `Cost.casts_shards` the shards and their gradients are in fp32, so they need no masters.
    """
    if cost.casts_shards and cost.master_itemsize:
        cost = cost.replace(param_itemsize=4.0, grad_itemsize=4.0, master_itemsize=0.0)
    shards, around = cost.size(*axes), _num_groups_around(cost.segments)
    calls = float(cost.num_blocks + around)
    keeps_gathered = keeps_gathered or once_a_step
    regathers = 0.0 if keeps_gathered else float(cost.num_blocks)  # torch keeps the root's group gathered
    trained = tuple(segment for segment in cost.segments if segment.num_trainable)
    reductions = float(sum(segment.count for segment in trained if segment.is_block) + _num_groups_around(trained))
    gathered = sum(
        segment.count * (2.0 if segment.is_block and not keeps_gathered else 1.0) * cost.local_params(segment)
        * segment.sent_itemsize(itemsize, cost.fp8_sent)
        for segment in cost.segments
    )  # fmt: skip
    trainable = cost.num_trainable
    reduced = reduced_itemsize * trainable
    out = 2.0 * gathered if copies == "both" else 0.0
    into = 0.0 if copies == "nothing" else reduced + itemsize * trainable
    cost = cost.replace(
        param_shards=cost.param_shards * shards,
        grad_shards=cost.grad_shards * (1.0 if once_a_step else shards),
        optim_shards=cost.optim_shards * shards,
        gathered_itemsize=itemsize,
        keeps_gathered=keeps_gathered,
        whole_grads=once_a_step,
        cast_itemsize=0.0,  # shards are cast before the gather
        cast_traffic_bytes=cost.cast_traffic_bytes / shards,
    )
    often = not once_a_step
    cost = _send(
        cost,
        Comm("all_gather", axes, gathered, calls + regathers, overlap, per_micro_batch=often, copied=out),
        Comm("reduce_scatter", axes, reduced, reductions, overlap, per_micro_batch=often, copied=into),
        calls_a_group=True,
    )
    between = Comm("all_reduce", replicas, reduced / shards, reductions, overlap, per_micro_batch=often)
    return _send(cost, between, calls_a_group=True, fewer_shards=min(shards, cost.expert_ranks))


def _send(cost: Cost, *comm: Comm, calls_a_group: bool = False, fewer_shards: float = 1.0) -> Cost:
    """Send parameters or gradients; of experts only between ranks that hold the same ones.

    Experts have groups of their own. With `calls_a_group` these take as many calls as the rest, else calls go by bytes.
    `fewer_shards`: a shard of experts over one of the rest.
    """
    share = cost.expert_share if cost.expert > 1 else 0.0
    if not share:
        return cost.send(*comm)
    for call in comm:
        size, _ = cost.expert_replicas(*call.axis)
        for part, factor, axis in ((1.0 - share, 1.0, call.axis), (share, fewer_shards, (*call.axis, EXPERT_AXIS))):
            if size > 1 or axis == call.axis:
                count = call.count * (1.0 if calls_a_group else part)
                sent = replace(call, axis=axis, num_bytes=part * factor * call.num_bytes, count=count)
                cost = cost.send(replace(sent, copied=part * call.copied))
    return cost


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
    often: bool = False,
) -> Comm:
    itemsize, trainable = cost.grad_itemsize if itemsize is None else itemsize, cost.num_trainable
    num_bytes = trainable * itemsize / cost.grad_shards
    reduced = reductions(cost, num_bytes / trainable, bucket_bytes) if num_bytes else Reductions(1, 1.0)
    overlap = 1 - reduced.last_share if overlaps else 0.0
    return Comm(kind, axes, num_bytes, count=reduced.calls, overlap=overlap, per_micro_batch=often)


FLAT_BYTES = 32 * 2**20
"""Size of buckets of parameters to broadcast or gather (runtime/data_parallel/buckets.py, shard_buckets.py)."""
MOST_VECTORS = 1024
"""Limit of vectors in a copy of a segment: more elements would belong to weights without a matmul, not to vectors."""


class Reductions(NamedTuple):
    """Calls that reduce all gradients, and the last call's share of all elements, which no backward can hide.

    The embedding table is the first parameter, so its gradient comes last.
    """

    calls: int
    last_share: float


def reductions(cost: Cost, itemsize: float, bucket_bytes: float) -> Reductions:
    """Buckets of gradients, filled from the last parameter to the first."""
    return _filled(_sizes(cost.segments, cost.tensor, cost.expert_divisor), bucket_bytes / itemsize)


def deal_out(cost: Cost, shards: int) -> tuple[int, float]:
    """Assign whole parameters to `shards` owners, the largest first, each to the least loaded (`ShardedOptimizer`).

    Returns the number of buckets that owners send, and the most loaded owner's share of all elements.
    """
    sizes = _sizes(cost.segments, cost.tensor, cost.expert_divisor)
    return _dealt(sizes, shards, FLAT_BYTES / cost.param_itemsize)


def num_sliced_buckets(cost: Cost) -> int:
    """The number of gathers of sliced parameters: a large one alone, small ones together in a bucket."""
    sizes = _sizes(cost.segments, cost.tensor, cost.expert_divisor)
    return _in_order(sizes, FLAT_BYTES / cost.param_itemsize)


@lru_cache(maxsize=256)
def _in_order(sizes: tuple[float, ...], most: float) -> int:
    """The number of buckets in order: the first parameter that does not fit closes a bucket."""
    num, held = 0, 0.0
    for size in reversed(sizes):
        if size >= most:
            num += 1
        elif held == 0.0 or held + size > most:
            num, held = num + 1, size
        else:
            held += size
    return num


@lru_cache(maxsize=256)
def _filled(sizes: tuple[float, ...], most: float) -> Reductions:
    num, held, last = 0, 0.0, 0.0
    for size in sizes:
        held += size
        if held >= most:
            num, held, last = num + 1, 0.0, held
    last = held or last
    return Reductions(num + (held > 0), last / sum(sizes) if last else 1.0)


@lru_cache(maxsize=256)
def _dealt(sizes: tuple[float, ...], shards: int, most: float) -> tuple[int, float]:
    """A parameter as large as a bucket gets its own; smaller ones share a bucket until the next does not fit."""
    owners = [(0.0, rank) for rank in range(shards)]
    open_buckets = [0.0] * shards
    num = 0
    for size in sorted(sizes, reverse=True):
        load, rank = owners[0]
        heapq.heapreplace(owners, (load + size, rank))
        if size >= most:
            num += 1
        elif open_buckets[rank] == 0.0 or open_buckets[rank] + size > most:
            num, open_buckets[rank] = num + 1, size
        else:
            open_buckets[rank] += size
    return num, max(load for load, _ in owners) / sum(sizes) if sizes else 1.0 / shards


@lru_cache(maxsize=256)
def _sizes(segments: tuple[Segment, ...], tensor: int, experts: float) -> tuple[float, ...]:
    """Elements of every trainable parameter on a device, in backward order."""
    copies = (segment for segment in reversed(segments) for _ in range(segment.count))
    return tuple(size for segment in copies for size in _of_copy(segment, tensor, experts))


def _of_copy(segment: Segment, tensor: int, experts: float) -> list[float]:
    """Elements of each parameter of a copy. If sizes are unknown, or split, the matmuls give the weights; the rest
    (norms and biases) counts as vectors of the model's width. A segment without matmuls is a table.
    """
    if segment.trainable_sizes and tensor == experts == 1:
        return list(segment.trainable_sizes)
    left, sizes, width = segment.num_trainable, [], 0
    for product in reversed(segment.matmuls):
        weight = float(product.inner * product.columns)
        width = width or (product.columns if segment.is_block else product.inner)
        for _ in range(round(product.count) if product.trainable else 0):
            if weight <= left:  # a larger one is tied to a parameter of another segment
                left -= weight
                divisor = experts if product.of_experts else 1 if product.split == "none" else tensor
                sizes.append(weight / divisor)
    if not width:
        return [left] if left else []
    vectors = min(math.ceil(left / width), MOST_VECTORS)
    return [*sizes, *[left / vectors] * vectors] if left else sizes
