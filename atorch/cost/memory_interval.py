"""Uncertainty of the estimate of a device's memory, by kind of bytes.

An error is the logarithm of measured over estimated bytes. Of a peak of which kind k is the share w_k its variance is

    s² = own² + Σ (w_k · sigma_k)²,

as of a step's seconds (`uncertainty`). What is kept of every parameter is known all but exactly; less is known of what
forward leaves for backward and of what one moment's work needs, least of what the allocator reserves beside.

Sigmas are fitted to published runs whose source was left out, those of which torch itself counted the bytes and whose
columns tell what they keep (`python benchmarks/planner_accuracy.py TABLE.csv … --leave-one-out` fits them again, and
prints what bands hold): as those of seconds are, around 0.02 for states, 0.1 for activations and working memory, and
0.3 for slack, each within a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

SIGMA: Mapping[str, float] = {"states": 0.013, "activations": 0.045, "working": 0.067, "slack": 0.42}
OWN = 0.02  # of every peak alike: sizes are rounded, figures are published to 0.1 GiB
LOW, HIGH = -1.48, 2.78  # quantiles of errors over s, between which four of five are

_KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("parameters", "gradients", "optimizer", "masters", "buffers"), "states"),
    **{"activations": "activations", "transient": "working", "working": "working", "slack": "slack"},
}


def memory_shares(memory: Mapping[str, float]) -> tuple[float, ...]:
    """The share of each kind of `SIGMA` in bytes by category."""
    held = dict.fromkeys(SIGMA, 0.0)
    for category, size in memory.items():
        held[_KIND_OF[category]] += size
    whole = sum(held.values())
    return tuple(size / whole if whole else 0.0 for size in held.values())


def memory_band(memory: Mapping[str, float]) -> tuple[float, float]:
    """The interval of bytes that holds four of five peaks with this estimate by category."""
    shares = zip(memory_shares(memory), SIGMA.values(), strict=True)
    spread = math.sqrt(OWN**2 + sum((share * sigma) ** 2 for share, sigma in shares))
    whole = sum(memory.values())
    return whole * math.exp(LOW * spread), whole * math.exp(HIGH * spread)
