"""The pass of a model with many similar blocks, unrolled from passes of the same model with fewer blocks.

A pass is cut where it first takes a parameter of each period of blocks, in forward and again in backward. A deeper
model repeats one stretch of forward and one of backward with other names, and the bytes at each instant grow linearly.
So two depths give the growth, and a third confirms it. The maximum over an operation's instants is taken last, since
the instant of the maximum moves with depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from atorch.runtime.chunk.schedule.pass_schedule import Access, AccessTrace

WARM, ENDS = 2, 2
"""Periods of the first and of the last blocks, which may differ from those between."""
FEWEST = WARM + 1 + ENDS
"""Periods of the shallowest usable model."""
_FORWARD, _BACKWARD = 1 + WARM, 2 * FEWEST - 1 - WARM
"""The stretches of the shallowest model that deeper ones repeat."""

Rename = Callable[[str, int], str]
_Numbers = np.ndarray[Any, Any]
_Origin = tuple[int, int]


class PassStretch(NamedTuple):
    """Consecutive operations and gradients of a pass."""

    events: list[tuple[str | None, frozenset[str]]]
    """Operations with their parameters; gradients have the name None."""
    instants: list[Sequence[int]]
    """For each operation, the bytes except parameters at each instant until the next one."""

    def renamed(self, periods: int, rename: Rename) -> list[tuple[str | None, frozenset[str]]]:
        """The events of the same stretch so many periods later."""
        if not periods:
            return self.events
        return [(operation, frozenset([rename(name, periods) for name in names])) for operation, names in self.events]

    @property
    def num_bytes(self) -> _Numbers:
        return np.array([size for sizes in self.instants for size in sizes], dtype=np.int64)

    @property
    def firsts(self) -> list[int]:
        """The first instant of each operation, and the number of all instants."""
        return [0, *accumulate(map(len, self.instants))]


def stretches(
    found: AccessTrace, instants: Sequence[Sequence[int]], num_periods: int, period_of: Callable[[str], int | None]
) -> list[PassStretch]:
    """A pass, cut where each period begins in forward, and each but the last in backward.

    Args:
        instants: for each operation, the bytes except parameters at each instant until the next one.
        period_of: the number of a parameter's period; None outside of the repeated blocks.
    """
    starts = [*range(num_periods), *reversed(range(num_periods - 1))]
    made, arrived = [PassStretch([], [])], 0
    for index, access in enumerate(found.accesses):
        if starts and starts[0] in map(period_of, access.parameters):
            made.append(PassStretch([], []))
            del starts[0]
        made[-1].events.append((access.operation, access.parameters))
        made[-1].instants.append(instants[index])
        while arrived < len(found.gradients) and found.gradients[arrived][0] <= index + 1:
            made[-1].events.append((None, frozenset((found.gradients[arrived][1],))))
            arrived += 1
    return made


def deeper(passes: Sequence[Sequence[PassStretch]], rename: Rename, periods: int) -> AccessTrace | None:
    """The pass of a model with `periods` more periods than the first of three; None if it does not follow from them.

    Args:
        passes: of three models, of FEWEST periods and of one and two more.
        rename: maps a parameter's name to that of its counterpart so many periods later. Names outside the repeated
            blocks map to themselves.
        periods: additional periods, compared with the first model.
    """
    first = passes[0]
    found: list[dict[_Origin, _Numbers]] = []
    for more, made in enumerate(passes):
        if len(made) != len(_origins(more)):
            return None
        for (number, later), stretch in zip(_origins(more), made, strict=True):
            if stretch.events != first[number].renamed(later, rename) or stretch.firsts != first[number].firsts:
                return None
        found.append({origin: stretch.num_bytes for origin, stretch in zip(_origins(more), made, strict=True)})

    def grown(number: int, later: int, more: int) -> _Numbers:
        """The bytes of a stretch in a pass with `more` more periods."""
        now, then = found[0][number, 0], found[1][number, int(_FORWARD < number < _BACKWARD)]
        is_repeated = number in (_FORWARD, _BACKWARD)
        by_later = found[1][number, 1] - then if is_repeated else np.zeros_like(now)
        num_bytes: _Numbers = now + more * (then - now) + later * by_later
        return num_bytes

    if any(not np.array_equal(num_bytes, grown(*origin, 2)) for origin, num_bytes in found[2].items()):
        return None
    accesses: list[Access] = []
    gradients: list[tuple[int, str]] = []
    for number, later in _origins(periods):
        firsts = first[number].firsts[:-1]
        most = iter(np.maximum.reduceat(grown(number, later, periods), firsts).tolist() if firsts else ())
        for operation, names in first[number].renamed(later, rename):
            if operation is None:
                gradients += [(len(accesses), name) for name in names]
            else:
                accesses.append(Access(operation, names, next(most)))
    return AccessTrace(accesses, gradients)


def _origins(more: int) -> list[_Origin]:
    """The origin of each stretch of a pass with `more` more periods: its number in the first pass, and periods later.

    The last period of forward and of backward are one stretch, with what lies between them.
    """
    return [
        *((number, 0) for number in range(_FORWARD)),
        *((_FORWARD, later) for later in range(more + 1)),
        *((number, more) for number in range(_FORWARD + 1, _BACKWARD)),
        *((_BACKWARD, later) for later in reversed(range(more + 1))),
        *((number, 0) for number in range(_BACKWARD + 1, 2 * FEWEST)),
    ]
