"""The number of calls that exchange parameters in buckets, from the shapes in a profile.

The parameter that fills a bucket closes it (Li et al. 2020, arXiv 2006.15704, section 3.2.3), and no parameter is split
over buckets. So for weights as large as a bucket the number of calls is not bytes over bucket size.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import NamedTuple

from atorch.cost.profile import Segment
from atorch.cost.state import Cost

FLAT_BYTES = 32 * 2**20
"""Size of buckets of parameters to broadcast or gather (runtime/data_parallel/buckets.py)."""
MOST_VECTORS = 1024
"""Limit of vectors in a copy of a segment: more elements would belong to weights without a product, not to vectors."""


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
    """Elements of each parameter of a copy. If sizes are unknown, or split, the products give the weights; the rest
    (norms and biases) counts as vectors of the model's width. A segment without products is a table.
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
