"""A pass of training as operations that need chunks, in order: as it was foreseen, and as it goes.

While a pass goes as foreseen, its steps are those that were scheduled. Where it takes another path, chunks are fetched
as they are needed and the least recently used make way, until the pass ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from atorch.runtime.chunk.schedule import Moment, Schedule, Step


class Access(NamedTuple):
    """One operation, and what it takes."""

    operation: str
    parameters: frozenset[str]
    other_bytes: int
    """The most bytes of everything but parameters, from this operation to the next."""


class Pass(NamedTuple):
    """A forward and backward pass: its operations, and where gradients come."""

    accesses: Sequence[Access]
    gradients: Sequence[tuple[int, str]]
    """The number of accesses that were before, and the parameter; in order."""


def moments(
    foreseen: Pass, chunk_of: Mapping[str, int], gathering: Sequence[int] = (), shards: int = 1
) -> list[Moment]:
    """The accesses by chunk.

    Args:
        gathering: bytes of each chunk's gradients where they are put together before they are reduced: they live from
            the first to the last, or to the end where some of a chunk's parameters get none.
        shards: the processes that reduce them. A share of the average lives from then on until the next one is there.
    """
    lives: dict[int, tuple[int, int]] = {}
    for position, name in foreseen.gradients if gathering else ():
        first, _ = lives.get(chunk_of[name], (position, position))
        lives[chunk_of[name]] = first, position
    come = {name for _, name in foreseen.gradients}
    for chunk in {chunk for name, chunk in chunk_of.items() if name not in come} & lives.keys():
        lives[chunk] = lives[chunk][0], len(foreseen.accesses)  # nobody knows before the end that no more will come
    held = [0] * len(foreseen.accesses)
    latest = share = 0
    for chunk, (first, last) in sorted(lives.items(), key=lambda life: life[1][1]):
        for position in range(max(0, latest - 1), max(latest, last)):
            held[position] += share
        latest = max(latest, last)  # chunks are reduced in the order in which they are complete
        for position in range(max(0, first - 1), latest):
            held[position] += gathering[chunk]
        share = gathering[chunk] // shards
    for position in range(max(0, latest - 1), len(held)):
        held[position] += share
    return [
        Moment(_said(each), frozenset(chunk_of[name] for name in each.parameters), each.other_bytes + more)
        for each, more in zip(foreseen.accesses, held, strict=True)
    ]


def _said(access: Access) -> str:
    first, *others = sorted(access.parameters)
    return f"{access.operation} of {first}" + (f" and {len(others)} more" if others else "")


class Nodes:
    """What the node of the backward pass that runs was given already, which stays until it is done.

    A node asks for what it saved one by one, and a checkpoint computes again inside of one of these requests.
    """

    def __init__(self) -> None:
        self._running: tuple[int, ...] = ()
        self._given: frozenset[Any] = frozenset()

    def given(self) -> frozenset[Any]:
        """What the node that runs has; nothing outside of a backward pass."""
        running = _running_node()
        if running != self._running:
            self._running, self._given = running, frozenset()
        return self._given

    def give(self, thing: Any) -> None:
        """The node that runs has `thing`, too."""
        self._given = self.given() | {thing}


def _running_node() -> tuple[int, ...]:
    """Numbers by which a node is known: who keeps one keeps the parameters that its graph leads to."""
    node = torch._C._current_autograd_node()
    return () if node is None else (torch._C._current_graph_task_id(), node._sequence_nr())


@dataclass
class Course:
    """Follows a schedule, and notes what is needed when."""

    moments: Sequence[Moment]
    schedule: Schedule | None
    strayed: bool = False
    """Whether a pass of training left the course."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self.seen: list[tuple[str, frozenset[int]]] = []
        self.on_course = self.schedule is not None

    def next(self, operation: str, needs: frozenset[int]) -> Step | None:
        """What to do before an operation that needs these chunks; None off course."""
        position = len(self.seen)
        self.seen.append((operation, needs))
        if position >= len(self.moments):
            return None  # the pass is over, and somebody looks at a parameter
        self.on_course = self.on_course and self.moments[position].needs == needs
        if not self.on_course:
            self.strayed = self.strayed or torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
            return None
        assert self.schedule is not None
        return self.schedule.steps[position]

    @property
    def other_bytes(self) -> int:
        """What else lives at the operation under way: as foreseen there, or anywhere."""
        if self.on_course and 0 < len(self.seen) <= len(self.moments):
            return self.moments[len(self.seen) - 1].other_bytes
        return max((each.other_bytes for each in self.moments), default=0)
