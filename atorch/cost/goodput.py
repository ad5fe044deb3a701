"""Goodput of a long run: the share of its time that trains, beside saves, failures, lost work and restarts.

With failures at random, M seconds apart in the mean, a checkpoint after every τ seconds of training that stops it for δ
seconds, and R seconds from a failure until training goes on, τ seconds of training take

    M · exp((R + L) / M) · (exp((τ + δ) / M) − 1)

seconds: the model of Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps". L is
the time until a checkpoint in the background is complete: a failure before loses the work since the one before it.
The interval is Daly's estimate of the optimum; its first term is Young's √(2 δ M) (1974). It is at least L, as one
checkpoint is written at a time, and at least a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MTBF_S = 54 * 24 * 3600 * 16384 / 419
"""Seconds between failures of one device: 419 unexpected interruptions in 54 days on 16,384 H100s (Llama Team 2024,
"The Llama 3 Herd of Models", arXiv 2407.21783)."""
MTBF_SOURCE = "419 interruptions in 54 days on 16,384 H100s: the Llama 3 paper, arXiv 2407.21783"
RESTART_S = 600.0
"""Seconds from a failure until training goes on: 10 minutes of stall for synchronous training, as in the abstract of
"Training LLMs with Fault Tolerant HSDP on 100,000 GPUs", arXiv 2602.00277."""
RESTART_SOURCE = "10 minutes of stall after a failure: arXiv 2602.00277"


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The share of a run's time that trains, and the interval between checkpoints."""

    share: float  # in [0, 1]
    interval_s: float  # of training between two checkpoints


def goodput(mtbf_s: float, *, stall_s: float, lag_s: float, restart_s: float, step_s: float) -> Goodput:
    """The goodput with the best interval.

    Args:
        mtbf_s: mean seconds between failures of the whole run.
        stall_s: seconds for which a save stops training.
        lag_s: seconds after that until the checkpoint is complete.
        restart_s: seconds from a failure until training goes on.
        step_s: seconds of a step; there is at most one checkpoint a step.
    """
    interval = max(_optimum(stall_s, mtbf_s), lag_s, step_s)
    exponent = (interval + stall_s) / mtbf_s
    lost = (restart_s + lag_s) / mtbf_s
    share = interval / mtbf_s / math.expm1(exponent) * math.exp(-lost) if exponent < 700 else 0.0
    return Goodput(share=share, interval_s=interval)


def _optimum(stall_s: float, mtbf_s: float) -> float:
    ratio = stall_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
