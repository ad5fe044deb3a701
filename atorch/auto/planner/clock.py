"""The time that a search may take, by rank 0's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT = 0.05  # of a limit, for what must be tidied up at its end and cannot be known
DEFAULT_S = 120.0  # where the user says nothing
DEFAULT_STEPS = 60  # of the baseline, where these take longer


@dataclass
class Clock:
    """Seconds since a search began, and those that are left of its limit; None is the default, which grows with steps.

    The first dry run may take what is left; where there is no limit (infinity), others have limits of their own.
    """

    limit: float | None = None
    now: Callable[[], float] = time.monotonic
    began: float = field(default=math.nan)
    _default: float = DEFAULT_S
    _kept: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.began):
            self.began = self.now()

    @property
    def seconds(self) -> float:
        return self.now() - self.began

    @property
    def whole(self) -> float:
        """The limit, less what is kept."""
        return (self._default if self.limit is None else self.limit) * (1 - KEPT)

    @property
    def left(self) -> float:
        """Of the limit, less what is kept for the end; negative where it is over."""
        return self.whole - self._kept - self.seconds

    def keep(self, seconds: float) -> None:
        """Applying what is chosen to the model itself takes so long, which the search is to leave."""
        self._kept = seconds

    def saw_step(self, seconds: float) -> None:
        """A step of the baseline takes so long."""
        self._default = max(DEFAULT_S, DEFAULT_STEPS * seconds)
