"""The number of calls that exchange parameters in buckets, from the shapes that a profile has.

A bucket is closed by the parameter that fills it (Li et al. 2020, arXiv 2006.15704, section 3.2.3), and a parameter is
in one of them, so that the number of calls is not bytes over the size of a bucket where weights are as large as one.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import NamedTuple

from atorch.cost.profile import Segment
from atorch.cost.state import Cost

FLAT_BYTES = 32 * 2**20
"""Of buckets in which parameters are sent by their owners, or gathered (runtime/buckets.py, sliced_buckets.py)."""
MOST_VECTORS = 1024
"""Of a copy of a segment, that are told apart: more would be no vectors, but weights that no product tells of."""


class Reductions(NamedTuple):
    """Calls that reduce all gradients, and of all elements the share of the last one's, which no backward is left for.

    A table of embeddings is the first parameter, so that its gradient is the last one.
    """

    calls: int
    last_share: float


def reductions(cost: Cost, itemsize: float, bucket_bytes: float) -> Reductions:
    """Buckets that the gradients fill, from the last parameter to the first."""
    return _filled(_sizes(cost.segments, cost.tensor, cost.expert_divisor), bucket_bytes / itemsize)


def deal_out(cost: Cost, shards: int) -> tuple[int, float]:
    """Whole parameters dealt to `shards` owners, the largest first, each to who has the least (runtime/zero.py).

    Returns the buckets in which they send them, and the share of all elements that the most loaded owner has.
    """
    sizes = _sizes(cost.segments, cost.tensor, cost.expert_divisor)
    return _dealt(sizes, shards, FLAT_BYTES / cost.param_itemsize)


def num_sliced_buckets(cost: Cost) -> int:
    """Gathers of parameters that all ranks have slices of: a large one alone, small ones side by side."""
    sizes = _sizes(cost.segments, cost.tensor, cost.expert_divisor)
    return _in_order(sizes, FLAT_BYTES / cost.param_itemsize)


@lru_cache(maxsize=256)
def _in_order(sizes: tuple[float, ...], most: float) -> int:
    """The number of buckets, first to last: a bucket is closed by the first parameter that does not fit."""
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
    """A parameter as large as a bucket goes alone; the others until the next one does not fit."""
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
    """Elements of every trainable parameter on a device, in the order in which backward comes to them."""
    return tuple(
        size for each in reversed(segments) for _ in range(each.count) for size in _of_copy(each, tensor, experts)
    )


def _of_copy(segment: Segment, tensor: int, experts: float) -> list[float]:
    """Parameters as they are. Of a shape, and of what is split, weights of products are known, and of the rest, norms
    and biases, the sum: vectors of the model's width. Without products it is a table.
    """
    if segment.trainable_sizes and tensor == experts == 1:
        return list(segment.trainable_sizes)
    left, sizes, width = segment.num_trainable, [], 0
    for product in reversed(segment.matmuls):
        weight = float(product.inner * product.columns)
        width = width or (product.columns if segment.is_block else product.inner)
        for _ in range(round(product.count) if product.trainable else 0):
            if weight <= left:  # else it is tied to a parameter of another segment
                left -= weight
                divisor = experts if product.of_experts else 1 if product.split == "none" else tensor
                sizes.append(weight / divisor)
    if not width:
        return [left] if left else []
    vectors = min(math.ceil(left / width), MOST_VECTORS)
    return [*sizes, *[left / vectors] * vectors] if left else sizes
