"""Loads of a mixture's experts: capacities, routers that are not even, and the busiest rank.

Ranks that share experts wait for the busiest of them, twice in every block. A router spreads tokens evenly, or sends
its busiest expert `expert_skew` times the mean: 1.07 to 1.47 with balancing losses, 17.8 without (Shazeer et al. 2017,
arXiv 1701.06538, table 6); 1.5 to 1.7 with losses as of 2024, 1.04 with biases instead (Wang et al. 2024, arXiv
2408.15664, table 2). A capacity drops or pads every load to a multiple of the mean: Lepikhin et al. 2020, arXiv
2006.16668, section 3.1. Without a capacity every load is computed as it is: Gale et al. 2022, arXiv 2211.15841.
"""

from __future__ import annotations

import math

from atorch.cost.profile import Matmul, Segment


def busiest_load(segment: Segment, share: float, *, ranks: int, capacity: float, skew: float) -> float:
    """Tokens sent to the busiest rank's experts, over the mean; 1 for a segment without experts.

    The busiest expert's neighbours on its rank get an even share of the other tokens. Random routing adds to that: the
    largest of n normal variables is at most √(2 ln n) deviations above the mean. A device has a `share` of the
    segment's traced tokens.
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
    """Bytes that a segment's experts save: inputs and results of their products."""
    first = _first(segment)
    if first is None:
        return 0.0
    features = sum(product.inner + product.columns for product in segment.matmuls if product.of_experts)
    return segment.dispatched_bytes * features / first.inner


def kept_elements(dense: float, experts: float, shards: float, ranks: int) -> float:
    """Elements of a sharded tensor on a device; expert parallelism over `ranks` leaves fewer shards for the experts."""
    return dense / shards + experts / max(1.0, shards / ranks)


def _first(segment: Segment) -> Matmul | None:
    return next((product for product in segment.matmuls if product.of_experts), None)
