"""Loads of a mixture's experts: capacities, a router that is not even, and the rank that has most to do.

Ranks that share out experts wait for the busiest of them, twice in every block. A router deals tokens out evenly, or
sends its busiest expert `expert_skew` times the mean: with losses that balance it 1.07 to 1.47, with none 17.8 (Shazeer
et al. 2017, arXiv 1701.06538, table 6), with losses as of 2024 1.5 to 1.7, with biases instead 1.04 (Wang et al. 2024,
arXiv 2408.15664, table 2). A capacity cuts or pads all loads to so many times the mean: Lepikhin et al. 2020, arXiv
2006.16668, section 3.1; without one every load is computed as it is: Gale et al. 2022, arXiv 2211.15841.
"""

from __future__ import annotations

import math

from atorch.cost.profile import Matmul, Segment


def busiest_load(segment: Segment, share: float, *, ranks: int, capacity: float, skew: float) -> float:
    """Tokens that experts of the rank which has most are sent, over the mean; 1 of a segment without experts.

    The busiest expert's neighbours on its rank are taken to share evenly, with all others, what it leaves. Tokens that
    choose by chance come beside that: of n normal variables the largest is at most √(2 ln n) deviations above the mean.
    A device has a `share` of the segment's traced tokens.
    """
    first = _first(segment)
    if first is None:
        return 1.0
    if capacity:
        return capacity
    if ranks == 1 or not skew or first.count <= 1:
        return 1.0
    skew, neighbours = min(skew, first.count), max(0.0, first.count / ranks - 1.0)
    load = (skew + neighbours * (first.count - skew) / (first.count - 1.0)) / (neighbours + 1.0)
    tokens = max(1.0, share * first.rows * first.count)
    return min(float(ranks), load + math.sqrt(2.0 * math.log(ranks) * load * (1.0 - 1.0 / ranks) / tokens))


def saved_bytes(segment: Segment) -> float:
    """Bytes that a segment's experts keep: what their products take, and what these give."""
    first = _first(segment)
    if first is None:
        return 0.0
    features = sum(each.inner + each.columns for each in segment.matmuls if each.of_experts)
    return segment.dispatched_bytes * features / first.inner


def kept_elements(dense: float, experts: float, shards: float, ranks: int) -> float:
    """Elements that a device keeps of what is sharded; experts over `ranks` leave fewer to shard them further."""
    return dense / shards + experts / max(1.0, shards / ranks)


def _first(segment: Segment) -> Matmul | None:
    return next((each for each in segment.matmuls if each.of_experts), None)
