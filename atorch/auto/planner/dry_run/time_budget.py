"""The time that a search may take, by rank 0's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT = 0.05  # of a limit, for what must be tidied up at its end and cannot be known
DEFAULT_S = 90.0  # where the user says nothing
DEFAULT_STEPS, DEFAULT_STARTS = 60, 16  # of what is chosen, and that compile nothing, where these take longer


@dataclass
class TimeBudget:
    """Seconds since a search began, and those left of its limit; None is the default, which grows with steps."""

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
        """Of the limit, less what is kept for the end; negative where it is over."""
        return self.whole - self.seconds

    def expects(self, step_s: float, start_s: float) -> None:
        """A step of what is chosen, and a start that compiles nothing, take so long."""
        self._default = max(DEFAULT_S, DEFAULT_STEPS * step_s, DEFAULT_STARTS * start_s)
