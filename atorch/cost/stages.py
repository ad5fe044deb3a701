"""What each stage of a pipeline holds: a cut of the model's segments into consecutive parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from atorch.cost.profile import Segment
from atorch.cost.state import Cost


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage's parts as `(segment, copies)`, in order; a stage of a model that is not cut has all of them."""

    index: int
    parts: tuple[tuple[Segment, float], ...]
    in_flight: float  # micro-batches whose activations it holds at once, counted in all of its blocks

    @property
    def num_blocks(self) -> float:
        """Repeated blocks, every copy counted."""
        return sum(copies for segment, copies in self.parts if segment.is_block)


def stages_of(cost: Cost) -> tuple[Stage, ...]:
    """The stages of a cost's pipeline, blocks spread evenly, the first ones taking what does not divide."""
    cut = _cut(cost.segments, cost.stages)
    return tuple(Stage(index, parts, in_flight(cost, index)) for index, parts in enumerate(cut))


def in_flight(cost: Cost, index: int) -> float:
    """Micro-batches whose activations stage `index` holds at once.

    GPipe holds all. 1F1B holds as many as there are stages from here on, interleaving some more: Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2. With `v` pieces, 2 (p - i - 1) + (v - 1) p + 1 pieces of 1 / v of the stage each.
    """
    micro_batches, stages, pieces = cost.num_micro_batches, cost.stages, cost.interleave
    if stages == 1:
        return 1.0
    if cost.schedule == "gpipe":
        return micro_batches
    if pieces > 1:
        held = 2 * (stages - index - 1) + (pieces - 1) * stages + 1
        return min(float(held), micro_batches * pieces) / pieces
    return min(float(stages - index), micro_batches)


@lru_cache(maxsize=4096)
def _cut(segments: Sequence[Segment], stages: int) -> tuple[tuple[tuple[Segment, float], ...], ...]:
    if stages == 1:
        return (tuple((segment, float(segment.count)) for segment in segments),)
    blocks = sum(segment.count for segment in segments if segment.is_block)
    shares = [blocks // stages + (index < blocks % stages) for index in range(stages)]
    cut: list[list[tuple[Segment, float]]] = [[] for _ in shares]
    index, room = 0, shares[0]
    for segment in segments:
        left = segment.count
        if not segment.is_block:
            cut[index].append((segment, float(left)))
            continue
        while left:
            while room == 0 and index + 1 < stages:
                index, room = index + 1, shares[index + 1]
            taken = min(left, room)
            cut[index].append((segment, float(taken)))
            left, room = left - taken, room - taken
    return tuple(map(tuple, cut))
