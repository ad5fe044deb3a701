"""Stages that are anywhere among the processes of a pipeline, and the order of their passes.

A process may have several stages, wherever in the model they lie. Which pass it runs next is found by playing the step
through: a forward pass takes one unit of time, a backward pass two, and a process that is free runs the first that is
ready, a backward one before a forward one (1F1B, Narayanan et al. 2021, arXiv 2104.04473) or, in rounds, after all
forward passes of a round (GPipe, Huang et al. 2018, arXiv 1811.06965). A micro-batch begins when fewer than `active`
are under way.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class PlacedSchedule:
    """The process of each stage, and the most micro-batches under way.

    rounds: all forward passes of `active` micro-batches come before their first backward.
    """

    places: tuple[int, ...]
    active: int
    rounds: bool = False


def by_torch(placed: PlacedSchedule, micro_batches: int) -> str | PlacedSchedule:
    """The name of torch's schedule that does the same, which costs the host less; `placed` itself where none does.

    Under torch's 1F1B as many micro-batches are under way as there are stages, under its GPipe all.
    """
    num_stages = len(placed.places)
    if placed.places != tuple(range(num_stages)):
        return placed
    if placed.rounds:
        return "gpipe" if placed.active >= micro_batches else placed
    return "1f1b" if placed.active >= num_stages else placed


class Turn(NamedTuple):
    """A pass of a micro-batch through a stage."""

    is_backward: bool
    stage: int
    number: int


def turns(placed: PlacedSchedule, micro_batches: int) -> list[list[Turn]]:
    """The passes of each process, in order; where nothing goes backward, torch leaves those passes out."""
    course = _Course(placed, micro_batches)
    order: list[list[Turn]] = [[] for _ in range(max(placed.places) + 1)]
    running: list[tuple[int, int, Turn]] = []  # (when it ends, process, pass)
    busy: set[int] = set()
    now = 0
    while True:
        for place in range(len(order)):
            turn = course.next(place) if place not in busy else None
            if turn is not None:
                course.begin(turn)
                busy.add(place)
                order[place].append(turn)
                heapq.heappush(running, (now + (2 if turn.is_backward else 1), place, turn))
        if not running:
            return order
        now = running[0][0]
        while running and running[0][0] == now:  # all that end now, before anybody chooses
            _, place, turn = heapq.heappop(running)
            busy.remove(place)
            course.end(turn)


class _Course:
    """The progress of each stage. Micro-batches pass a stage one after another, forward and backward."""

    def __init__(self, placed: PlacedSchedule, micro_batches: int) -> None:
        self._placed, self._count = placed, micro_batches
        self._last = len(placed.places) - 1
        self._begun: dict[bool, list[int]] = {way: [0] * (self._last + 1) for way in (False, True)}
        self._ended: dict[bool, list[int]] = {way: [0] * (self._last + 1) for way in (False, True)}

    def begin(self, turn: Turn) -> None:
        self._begun[turn.is_backward][turn.stage] += 1

    def end(self, turn: Turn) -> None:
        self._ended[turn.is_backward][turn.stage] += 1

    def next(self, place: int) -> Turn | None:
        """The next turn of a free process; None where nothing is ready."""
        stages = [stage for stage in range(self._last, -1, -1) if self._placed.places[stage] == place]
        return next(self._ready(stages), None)

    def _ready(self, stages: Sequence[int]) -> Iterator[Turn]:
        for is_backward in (False, True) if self._placed.rounds else (True, False):
            for stage in stages:
                number = self._begun[is_backward][stage]
                if number < self._count and (self._goes_back if is_backward else self._goes_on)(stage, number):
                    yield Turn(is_backward, stage, number)

    def _goes_on(self, stage: int, number: int) -> bool:
        if stage:
            return self._ended[False][stage - 1] > number
        done, active = self._ended[True][0], self._placed.active
        return number < (done // active + 1) * active if self._placed.rounds else number < done + active

    def _goes_back(self, stage: int, number: int) -> bool:
        if stage < self._last and self._ended[True][stage + 1] <= number:
            return False
        active = self._placed.active
        round_end = min(self._count, (number // active + 1) * active) if self._placed.rounds else number + 1
        return self._ended[False][stage] >= round_end
