"""The effect on a cost of each way to spread a model over devices. Shared by all that fold costs.

A split along tensor, sequence, context, expert or pipeline is a field of the cost, and `time` knows what that sends in
every micro-batch, so that what is recomputed or cast later counts without another word. What replicas and shards of
parameters exchange depends on how it is done, in buckets, by block, in which dtype: that is `Comm`s in the cost.
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
SAMPLE_AXES = ("data", "zero")
"""Axes whose ranks see different samples."""
REPLICA_AXES = ("data", "zero", "sequence", "context")
"""Axes whose ranks hold the same parameters and see different tokens: gradients are summed over them."""


def arrange(cost: Cost, sizes: Mapping[str, int]) -> Cost:
    """Ranks along `AXES` in their usual order; the batch shared out over the axes that see different samples."""
    cost = cost.but(axes={name: sizes[name] for name in AXES if sizes.get(name, 1) > 1})
    return cost.but(batch_size=cost.batch_size / cost.size(*SAMPLE_AXES))


def split_tensor(cost: Cost, *, splits_norms: bool = False) -> Cost:
    """Products by columns and rows over the tensor axis; with `splits_norms` what lies between them by tokens.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.
    """
    return cost.but(tensor=cost.size("tensor"), splits_norms=splits_norms and cost.size("tensor") > 1)


def split_sequence(cost: Cost) -> Cost:
    """Tokens over the sequence axis, heads inside attention: Jacobs et al. 2023, arXiv 2309.14509, section 3."""
    return cost.but(sequence=cost.size("sequence"))


def split_context(cost: Cost) -> Cost:
    """Tokens over the context axis, keys and values passed around: Liu et al. 2023, arXiv 2310.01889, section 3."""
    return cost.but(context=cost.size("context"))


def whole_outside(cost: Cost) -> Cost:
    """Outside of blocks all tokens on every rank of a tensor split, and of a sequence or context split its own.

    All there, too, where the loss is no cross entropy, and so asks for whole logits, or a pipeline's stages send.
    """
    has_losses = any(each.num_losses for each in cost.segments)
    return cost.but(whole_outside=True, own_tokens=has_losses and cost.size("pipeline") == 1)


def split_pipeline(
    cost: Cost, *, schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b", interleave: int = 1
) -> Cost:
    """Blocks over the pipeline axis, each rank with `interleave` pieces of the model."""
    return cost.but(stages=cost.size("pipeline"), schedule=schedule, interleave=interleave)


def accumulate(cost: Cost, num_micro_batches: float) -> Cost:
    """A step in so many micro-batches, gradients summed."""
    return cost.but(num_micro_batches=float(num_micro_batches))


def replicate(
    cost: Cost,
    *,
    axes: tuple[str, ...] = REPLICA_AXES,
    itemsize: float | None = None,
    bucket_bytes: float = 25 * MiB,
    overlaps: bool = True,
) -> Cost:
    """Gradients all-reduced once a step in buckets, which all but the last can hide behind backward.

    Li et al. 2020, arXiv 2006.15704, section 3.2. `itemsize` is of what is sent; by default as gradients are kept.
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
    """Optimizer state sharded: gradients reduced to their owners, parameters gathered from them after the update.

    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Gradients are reduced over `axes`, the state is sharded
    `over` as many or fewer of them. Who has whole parameters broadcasts them; slices are gathered, in "sliced" where
    these are not as the gradients' buckets (runtime/sliced_buckets.py), or all "at once". With `gathers_ahead` the next
    forward pass waits for the first bucket alone.
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
    """Parameters, gradients and optimizer state sharded; each block gathered before it computes, its gradients reduced.

    Zhao et al. 2023, arXiv 2304.11277. All of it in every micro-batch, or `once_a_step`: then parameters stay gathered
    over a step's micro-batches, and their gradients whole. Blocks are gathered again in backward unless
    `keeps_gathered`; over `replicas` the shards of gradients are all-reduced. FSDP2 copies parameters out of the buffer
    that they are gathered in, and gradients into one (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); FSDP1,
    whose parameters are views of what is gathered, copies gradients alone.
    """
    shards, around = cost.size(*axes), _num_groups_around(cost.segments)
    calls = float(cost.num_blocks + around)
    keeps_gathered = keeps_gathered or once_a_step
    again = 0.0 if keeps_gathered else float(cost.num_blocks)  # the others stay gathered, as torch does with a root
    trained = tuple(each for each in cost.segments if each.num_trainable)
    reductions = float(sum(each.count for each in trained if each.is_block) + _num_groups_around(trained))
    gathered = sum(
        each.count * (2.0 if each.is_block and not keeps_gathered else 1.0) * cost.local_params(each)
        * each.sent_itemsize(itemsize)
        for each in cost.segments
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
        cast_itemsize=0.0,  # shards are cast before they are gathered
        cast_traffic_bytes=cost.cast_traffic_bytes / shards,
    ).send(
        Comm("all_gather", axes, gathered, calls + again, overlap, each_micro_batch=not once_a_step, copied=out),
        Comm("reduce_scatter", axes, reduced, reductions, overlap, each_micro_batch=not once_a_step, copied=into),
        Comm("all_reduce", replicas, reduced / shards, reductions, overlap, each_micro_batch=not once_a_step),
    )


def _num_groups_around(segments: tuple[Segment, ...]) -> int:
    """The number of groups gathered outside of blocks: embeddings, a head of its own, and the rest with the root."""
    tables = head = rest = False
    for each in (segment for segment in segments if not segment.is_block):
        largest = max((product.inner * product.columns for product in each.matmuls), default=0)
        own = largest if 0 < largest <= each.num_params else 0
        tables |= not each.matmuls and each.num_params > 0
        head |= own > 0
        rest |= bool(each.matmuls) and each.num_params > own
    return tables + head + rest


def share_buffers(cost: Cost, axes: tuple[str, ...] = REPLICA_AXES) -> Cost:
    """Buffers sent from the first replica before the first forward pass of a step."""
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
