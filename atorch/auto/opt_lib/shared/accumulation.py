"""The cost of gradient accumulation over micro-batches."""

from __future__ import annotations

from dataclasses import replace

from atorch.cost import Cost


def reduce_once(cost: Cost) -> Cost:
    """Keep gradients of gathered parameters full, in fp32, and reduce them once, after the last micro-batch.

    FSDP2 works this way under micro_batch and in torch's pipelines. Methods whose gradient shards persist between
    steps add to them in every micro-batch instead.
    """
    if cost.num_micro_batches == 1 or not cost.gathered_itemsize or cost.grads_persist:
        return cost
    comm = (call if call.kind == "all_gather" else replace(call, each_micro_batch=False) for call in cost.comm)
    return cost.but(grad_itemsize=4.0, grad_shards=1.0, whole_grads=True, comm=tuple(comm))


def in_buckets(cost: Cost, replicas: int) -> Cost:
    """Keep gradients in the buckets that DistributedDataParallel reduces; a single replica has no buckets.

    A pipeline accumulates gradients outside of the buckets, so it holds both.
    """
    if replicas == 1:
        return cost
    cost = cost.but(grads_persist=True)
    if cost.stages == 1:
        return cost
    return cost.but(bucket_itemsize=cost.bucket_itemsize + cost.grad_itemsize)
