"""The cost of gradient accumulation over micro-batches."""

from __future__ import annotations

from dataclasses import replace

from atorch.cost import Cost


def reduce_once(cost: Cost) -> Cost:
    """Gradients of gathered parameters stay whole, in fp32, until the last micro-batch, and are reduced after it alone.

    That is how FSDP2 runs under micro_batch and in torch's pipelines. Shards that keep their place between steps are
    added to in every micro-batch.
    """
    if cost.num_micro_batches == 1 or not cost.gathered_itemsize or cost.grads_persist:
        return cost
    comm = (each if each.kind == "all_gather" else replace(each, each_micro_batch=False) for each in cost.comm)
    return cost.but(grad_itemsize=4.0, grad_shards=1.0, whole_grads=True, comm=tuple(comm))


def in_buckets(cost: Cost, replicas: int) -> Cost:
    """Gradients stay in the buckets that DistributedDataParallel reduces them in; one replica has none.

    In a pipeline they are added up beside the buckets.
    """
    if replicas == 1:
        return cost
    cost = cost.but(grads_persist=True)
    if cost.stages == 1:
        return cost
    return cost.but(bucket_itemsize=cost.bucket_itemsize + cost.grad_itemsize)
