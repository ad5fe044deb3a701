"""Finds slow processes by what each of them took for its own work in the same steps.

Processes that train together take equally long for every step, whichever of them is slow: the others wait. So what is
compared is what a process does before it can wait for another. Of those that wait for one another in the midst of it,
the one that took least hardly waited: its time stands for all of them, and they are named together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from atorch.units import format_seconds

PARTS = ("data", "forward", "backward")
"""A process's own work in a step."""
SPREAD = 6.0  # median deviations from the median; of normally distributed times four standard deviations
NAMED = 8  # ranks that a message names


@dataclass(frozen=True)
class Straggler:
    """A slow part of the step: a process, or several that wait for one another in it."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    part: str  # of PARTS
    own_s: float  # what it takes for it, a step
    median_s: float  # what its peers take
    reports: int  # in a row that say so

    def __str__(self) -> str:
        several = len(self.ranks) > 1
        ranks = ", ".join(map(str, self.ranks[:NAMED])) + (", …" if len(self.ranks) > NAMED else "")
        hosts = ", ".join(list(dict.fromkeys(self.hosts))[:NAMED])
        who = f"one of ranks {ranks}, which wait for one another in it," if several else f"rank {ranks}"
        return (
            f"{who} on {hosts} takes {format_seconds(self.own_s)} a step for {self.part}, where the median is "
            f"{format_seconds(self.median_s)}"
        )


@dataclass(frozen=True)
class StepReport:
    """Seconds of a step since the last report, by rank."""

    step: int  # steps that the optimizer has taken since the times are measured
    steps_s: Sequence[float]  # whole steps
    parts_s: Mapping[str, Sequence[float]]  # those of PARTS; 0 where a part is not measured
    stragglers: Sequence[Straggler] = ()

    def __str__(self) -> str:
        rows = {"whole": self.steps_s, **self.parts_s}
        told = ", ".join(
            f"{name} {' / '.join(map(format_seconds, (min(each), median_low(each), max(each))))}"
            for name, each in rows.items()
        )
        return f"step {self.step}: least / median / most of {len(self.steps_s)} processes: {told}"


def behind(
    own_s: Sequence[float], whole_s: Sequence[float], margin: float, units: Sequence[int], peers: Sequence[int]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """The ranks that are slow in a part of the step, with what it takes them and the median of their peers.

    Slow is what takes longer than the (lower) median by more than `margin` of the median step, and by more than SPREAD
    times the median deviation from the median.

    Args:
        own_s, whole_s: what the part and the whole step take, by rank.
        units: by rank, a number that those share who wait for one another in this part.
        peers: by rank, a number that those share who do the same work.
    """
    least, found = margin * median_low(whole_s), {}
    for kind in sorted(set(peers)):
        members: dict[int, list[int]] = {}
        for rank, unit in enumerate(units):
            if peers[rank] == kind:
                members.setdefault(unit, []).append(rank)
        times = {unit: min(own_s[rank] for rank in ranks) for unit, ranks in members.items()}
        middle = median_low(times.values())
        spread = median_low(abs(each - middle) for each in times.values())
        for unit, taken in times.items():
            if taken - middle > max(least, SPREAD * spread):
                found[tuple(members[unit])] = (taken, middle)
    return found
