"""Minimum bytes that any chunk manager can fetch, even if it knows the whole step beforehand.

Each byte of a parameter counts by itself: any part may stay between two uses. A gap between consecutive uses keeps x
bytes of the parameter. At each moment, all bytes kept must fit together with what the moment needs:

    maximise the sum of x over all gaps, subject to
    0 <= x <= bytes of the parameter
    held[t] = held[t - 1] + x of gaps that open at t - x of gaps that close at t
    0 <= held[t] <= budget - other bytes[t] - bytes needed at t

Each use of a parameter fetches its bytes, less those kept. There are no chunks, no padding and no transfer times: this
is a lower bound for all managers. HiGHS solves it (Huangfu and Hall 2018, doi 10.1007/s12532-017-0130-5).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack

from atorch.runtime.chunk.transfer_schedule import ScheduleStep


def lower_bound(moments: Sequence[ScheduleStep], parameter_bytes: Sequence[int], budget_bytes: int) -> float:
    """Minimum bytes fetched in a step; infinite if a moment does not fit.

    Args:
        moments: as for a schedule, with indices of parameters as needs.
        parameter_bytes: bytes of each parameter.
        budget_bytes: of the device, for parameters and everything else.
    """
    size = np.array(parameter_bytes, dtype=float)
    needed = [list(moment.needs) for moment in moments]
    room = np.array(
        [budget_bytes - moment.other_bytes - size[needs].sum() for moment, needs in zip(moments, needed, strict=True)]
    )
    if (room < 0).any():
        return float("inf")
    gaps = _gaps(needed)
    uses = sum(float(size[needs].sum()) for needs in needed)
    if not gaps:
        return uses
    opens, closes, parameters = np.array(gaps).T
    count, ends = len(gaps), len(moments)
    column = np.arange(count)
    # A gap between neighbouring moments opens and closes at once: its entries cancel, and it takes no room.
    kept = csr_array(
        (np.repeat([1.0, -1.0], count), (np.r_[opens, closes], np.r_[column, column])), shape=(ends, count)
    )
    step = np.arange(ends)
    held = csr_array((np.r_[-np.ones(ends), np.ones(ends - 1)], (np.r_[step, step[1:]], np.r_[step, step[:-1]])))
    scale = max(size.max(), 1.0)  # the solver's tolerances are absolute
    limits = np.r_[size[parameters], room] / scale
    solution = linprog(
        np.r_[-np.ones(count), np.zeros(ends)],
        A_eq=hstack([kept, held]),
        b_eq=np.zeros(ends),
        bounds=np.c_[np.zeros(count + ends), limits],
        method="highs",
    )
    return uses + solution.fun * scale


def _gaps(needed: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(first moment inside the gap, next use, parameter) for any two consecutive uses."""
    latest: dict[int, int] = {}
    gaps = []
    for now, parameters in enumerate(needed):
        for parameter in parameters:
            if parameter in latest:
                gaps.append((latest[parameter] + 1, now, parameter))
            latest[parameter] = now
    return gaps
