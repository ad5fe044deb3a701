"""Chooses among possible splits, where not all can be or need be made: a small integer program.

A variable for each split is 1 where it is made. Splits that take the same parameter exclude each other: of three layers
in a row, the middle one goes with the one before it or with the one after. What is best is decided by several goals,
one after another, each among what is best by those before it.

- Where nothing bounds memory, the ranks share what they can: the most work, then the most memory, for the least that is
  sent. To send the least alone would mean to split nothing.
- Where a rank may hold no more than so much, the least is sent for that, and only what is split to that end.

HiGHS (Huangfu and Hall 2018, doi 10.1007/s12532-017-0130-5) solves each to a proven optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIKE = 1e-6
"""Of the largest of a goal's values: what differs by less is as good."""


@dataclass(frozen=True)
class Option:
    """Something that can be split: what of it each rank is spared, and what all of them send."""

    cuts: frozenset[str]
    """The parameters, each of which only one option can take."""
    spared_work: float
    """Multiplications and additions in forward, on the batch that was watched."""
    spared_bytes: float
    """Of parameters."""
    sent: float
    """Elements of all collectives in forward and backward, on that batch."""


def choose(
    options: Sequence[Option], ties: Sequence[Sequence[str]] = (), needed_bytes: float | None = None
) -> list[int] | None:
    """The indices of the options that are taken, ascending; None where no choice spares `needed_bytes`.

    Args:
        ties: names of one parameter each, which is cut under all of them or under none.
        needed_bytes: what each rank has to be spared of parameters; None: as much as can be.
    """
    at_most = _exclusions(options, ties)
    work = np.array([option.spared_work for option in options])
    spared = _spared_bytes(options)
    sent = np.array([option.sent for option in options])
    if needed_bytes is None:
        return _least([-work, -spared, sent], at_most)
    return _least([sent, -work, -spared], [*at_most, (-spared, -needed_bytes)])


def most_spared(options: Sequence[Option], ties: Sequence[Sequence[str]] = ()) -> float:
    """The most bytes that each rank can be spared of parameters."""
    spared = _spared_bytes(options)
    return float(spared[_least([-spared], _exclusions(options, ties))].sum())


def _spared_bytes(options: Sequence[Option]) -> Any:
    return np.array([option.spared_bytes for option in options])


def _exclusions(options: Sequence[Option], ties: Sequence[Sequence[str]]) -> list[tuple[Any, float]]:
    """One option a parameter, and for a parameter of several names one under each of them or none at all."""
    takes = {name: np.zeros(len(options)) for option in options for name in option.cuts}
    for index, option in enumerate(options):
        for name in option.cuts:
            takes[name][index] = 1.0
    distinct = {tuple(row): row for row in takes.values()}  # the parameters of one option are as one
    at_most = [(row, 1.0) for row in distinct.values() if row.sum() > 1]
    for first, *others in ties:
        apart = [takes[first] - takes[other] for other in others]
        at_most += [(sign * row, 0.0) for row in apart if row.any() for sign in (1, -1)]
    return at_most


def _least(goals: Sequence[Any], at_most: list[tuple[Any, float]]) -> list[int] | None:
    """The least by the first goal, then by the next; every pair in `at_most` is a row and what it may come to."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    made: Any = np.zeros(len(goals[0]))
    for goal in goals:
        size = np.abs(goal).max(initial=0.0)
        if size == 0.0:
            continue
        rows = [_scaled(row, bound) for row, bound in at_most]
        limits = [LinearConstraint(row, ub=bound) for row, bound in rows]
        found = milp(goal / size, constraints=limits, integrality=1, bounds=Bounds(0, 1), options={"mip_rel_gap": 0})
        if found.x is None:
            return None
        made = found.x.round()
        at_most = [*at_most, (goal, float(goal @ made) + ALIKE * size)]
    return [int(index) for index in made.nonzero()[0]]


def _scaled(row: Any, bound: float) -> tuple[Any, float]:
    """The same inequality in numbers near 1: HiGHS takes 1e-6 for nothing."""
    size = np.abs(row).max(initial=0.0) or 1.0
    return row / size, bound / size
