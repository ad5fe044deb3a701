"""Real ranks against simulated ones: the same calls, the same bytes sent, and the same bytes held."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from atorch.auto.planner.simulate.depth_extrapolation import Observed
from atorch.auto.planner.simulate.simulation import Simulated

AGREES = 0.03  # of the most that a rank holds

RUNS = 3
"""Real runs whose least peak counts. gloo's threads let go of what they sent a little after it has arrived, so that now
and then a run holds a message for longer; never does one hold less than it must."""

FEWER_MICRO_BATCHES = "more micro-batches do as the last"  # the note of a simulation that left moments out


def assert_as_simulated(expected: Sequence[Simulated], run: Callable[[], list[Observed]]) -> None:
    """That the first ranks of `run` do what was expected of each, and hold as much within 3 %."""
    least = [float("inf") for _ in expected]
    for _ in range(RUNS):
        for rank, (simulated, happened) in enumerate(zip(expected, run(), strict=False)):
            assert simulated.collectives == happened.sent
            if not any(FEWER_MICRO_BATCHES in note for note in simulated.notes):
                places = [(moment.name, moment.index) for moment in happened.moments]
                assert [(moment.name, moment.index) for moment in simulated.moments] == places
            least[rank] = min(least[rank], max(moment.total_bytes for moment in happened.moments))
        if [simulated.peak_bytes for simulated in expected] == pytest.approx(least, rel=AGREES):
            return
    assert [simulated.peak_bytes for simulated in expected] == pytest.approx(least, rel=AGREES)
