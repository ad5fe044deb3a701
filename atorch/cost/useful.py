"""FLOPs that a model needs, whatever a strategy does: what MFU counts. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from atorch.cost.splits import SAMPLE_AXES
from atorch.cost.state import Cost

_SIXTEEN_BITS = ("bfloat16", "float16", "float32")  # the first that a device has is what MFU is a share of


def useful_flops(cost: Cost) -> float:
    """FLOPs of a step on all devices together: forward once and backward once, nothing that runs again.

    Backward has two products for each of forward, one where the weight is frozen, and two for attention, of which a
    causal one computes half of the scores (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, which counts them all).
    """
    samples = cost.batch_size * cost.size(*SAMPLE_AXES) / cost.traced_batch
    return samples * sum(
        each.count
        * (sum(product.flops * (3 if product.trainable else 2) for product in each.matmuls) + 3 * each.attention_flops)
        for each in cost.segments
    )


def utilisation_peak(peak_flops: Mapping[str, float]) -> float:
    """A device's dense FLOP/s in 16 bits, of which MFU is a share, or in fp32 where it has no others; 0: unknown."""
    return next((peak_flops[name] for name in _SIXTEEN_BITS if name in peak_flops), 0.0)
