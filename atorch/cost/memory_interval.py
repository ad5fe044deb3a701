"""Uncertainty of the estimate of a device's memory, by kind of bytes.

An error is the logarithm of measured over estimated bytes. If kind k has the share w_k of a peak, its variance is

    s² = own² + Σ (w_k · sigma_k)²,

as for a step's seconds (`uncertainty`). Bytes per parameter are known almost exactly, activations and working memory
less well, and the allocator's slack least.

Sigmas are fitted to published runs, each source left out in turn. The runs used are those whose bytes torch counted
and whose columns list the kept tensors. `python benchmarks/planner_accuracy.py TABLE.csv … --leave-one-out` repeats the
fit and prints the coverage of bands. The priors are as for seconds: around 0.02 for states, 0.1 for activations and
working memory, and 0.3 for slack, each within a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

SIGMA: Mapping[str, float] = {"states": 0.013, "activations": 0.045, "working": 0.067, "slack": 0.42}
OWN = 0.02  # of every peak: sizes are rounded, figures are published to 0.1 GiB
LOW, HIGH = -1.48, 2.78  # quantiles of errors over s; four of five errors lie between them

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
    """The interval of bytes that contains four of five peaks with this estimate by category."""
    shares = zip(memory_shares(memory), SIGMA.values(), strict=True)
    spread = math.sqrt(OWN**2 + sum((share * sigma) ** 2 for share, sigma in shares))
    whole = sum(memory.values())
    return whole * math.exp(LOW * spread), whole * math.exp(HIGH * spread)
