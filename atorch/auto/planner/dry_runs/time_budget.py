"""The time limit of a search, by rank 0's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT = 0.05  # share of a limit for cleaning up at its end
DEFAULT_S = 90.0  # default limit
DEFAULT_STEPS, DEFAULT_STARTS = 60, 16  # steps of the choice, and starts without compiler, if these take longer


@dataclass
class TimeBudget:
    """Seconds since a search began, and those left of its limit; None: the default, which grows with the step time."""

    limit: float | None = None
    now: Callable[[], float] = time.monotonic
    began: float = field(default=math.nan)
    _default: float = DEFAULT_S

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            self.began = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.began

    @property
    def whole(self) -> float:
        return (self._default if self.limit is None else self.limit) * (1 - KEPT)

    @property
    def left(self) -> float:
        """Seconds left of the limit, less the share for the end; negative if it is over."""
        return self.whole - self.seconds

    def expects(self, step_s: float, start_s: float) -> None:
        """Set the expected seconds of the choice's step, and of a start without compiler, for the default limit."""
        self._default = max(DEFAULT_S, DEFAULT_STEPS * step_s, DEFAULT_STARTS * start_s)
