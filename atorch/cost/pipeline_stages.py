"""The stages of a pipeline: a cut of the model's segments into consecutive parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from atorch.cost.profile import Segment
from atorch.cost.state import Cost

StageParts = tuple[tuple[Segment, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StageCost:
    """A stage's parts as `(segment, copies)`, in order; without a pipeline one stage has all of them."""

    index: int
    parts: StageParts
    in_flight: float  # micro-batches whose activations it holds at once, in units of all its blocks
    waiting: float = 0.0  # of them, those whose weights' gradients are deferred

    @property
    def num_blocks(self) -> float:
        return sum(copies for segment, copies in self.parts if segment.is_block)


@dataclass(frozen=True, slots=True, eq=False)
class PipelineCut:
    """A cut of a model's segments into the stages of a pipeline."""

    segments: tuple[Segment, ...]
    parts: tuple[StageParts, ...]  # of each stage
    runs: tuple[tuple[StageParts, int], ...]  # run-length encoded: parts, number of consecutive stages
    uncovered: tuple[int, ...]  # stages that no earlier stage covers with as many copies of every segment


def stages_of(cost: Cost) -> tuple[StageCost, ...]:
    """The stages of a cost's pipeline, balanced by FLOPs or by blocks; the first stages take the remaining blocks."""
    parts = cut_of(cost).parts
    return tuple(
        StageCost(index, held, in_flight(cost, index), _waiting(cost, index)) for index, held in enumerate(parts)
    )


def heaviest_stages(cost: Cost) -> tuple[StageCost, ...]:
    """The stages that can need the most memory: those that no earlier stage, with more in flight, covers.

    In a zero-bubble schedule later stages defer more, so the last stage of each run of equal stages counts.
    """
    cut = cut_of(cost)
    indices = cut.uncovered
    if cost.schedule == "zero_bubble":
        indices = tuple(accumulate((number for _, number in cut.runs), initial=-1))[1:]
    return _heaviest(cut, tuple((index, in_flight(cost, index), _waiting(cost, index)) for index in indices))


@lru_cache(maxsize=4096)
def _heaviest(cut: PipelineCut, stages: tuple[tuple[int, float, float], ...]) -> tuple[StageCost, ...]:
    return tuple(StageCost(index, cut.parts[index], held, waiting) for index, held, waiting in stages)


def in_flight(cost: Cost, index: int) -> float:
    """Micro-batches whose activations stage `index` holds at once.

    GPipe holds all. 1F1B holds as many as there are stages from here on, interleaving some more: Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2. With `v` pieces, 2 (p - i - 1) + (v - 1) p + 1 pieces of 1 / v of the stage each.
    Zero-bubble keeps them until the gradients of weights are computed, which later stages defer the longest: each holds
    as many as the first.
    """
    micro_batches, stages, pieces = cost.num_micro_batches, cost.stages, cost.interleave
    if stages == 1:
        return 1.0
    if cost.schedule == "gpipe":
        return micro_batches
    if cost.schedule == "zero_bubble":
        return min(float(stages), micro_batches)
    if pieces > 1:
        held = 2 * (stages - index - 1) + (pieces - 1) * stages + 1
        return min(float(held), micro_batches * pieces) / pieces
    return min(float(stages - index), micro_batches)


def _waiting(cost: Cost, index: int) -> float:
    """Micro-batches for which stage `index` has computed the inputs' gradients, but not yet the weights'.

    The first stage computes both at once. The second defers one micro-batch and holds the one it just processed.
    """
    return min(index + 1.0, cost.num_micro_batches) if cost.schedule == "zero_bubble" and index else 0.0


def cut_of(cost: Cost) -> PipelineCut:
    """The cut of a cost's pipeline into stages. Equal cuts are one object, so caches compare them by identity."""
    return _cut(cost.segments, cost.stages, cost.balances_flops)


@lru_cache(maxsize=4096)
def _cut(segments: tuple[Segment, ...], stages: int, balances_flops: bool) -> PipelineCut:
    cut: list[dict[int, float]] = [{} for _ in range(stages)]
    places = _by_flops(segments, stages) if balances_flops else _by_blocks(segments, stages)
    for position, stage in places:
        cut[stage][position] = cut[stage].get(position, 0.0) + 1.0
    uncovered: list[int] = []
    for stage, held in enumerate(cut):
        if not any(all(cut[earlier].get(at, 0.0) >= held[at] for at in held) for earlier in uncovered):
            uncovered.append(stage)
    shared: dict[tuple[tuple[int, float], ...], StageParts] = {}  # equal parts are one object, so groupby is quick
    parts = [
        shared.setdefault(tuple(held.items()), tuple((segments[position], copies) for position, copies in held.items()))
        for held in cut
    ]
    runs = tuple((run, len(list(alike))) for run, alike in groupby(parts))
    return PipelineCut(segments, tuple(parts), runs, tuple(uncovered))


def _by_blocks(segments: Sequence[Segment], stages: int) -> Iterator[tuple[int, int]]:
    """`(position of the segment, stage)` of every copy: equally many blocks; other segments follow the block before."""
    blocks = sum(segment.count for segment in segments if segment.is_block)
    larger, size = blocks % stages, blocks // stages
    passed, stage = 0, 0
    for position, segment in enumerate(segments):
        for _ in range(segment.count):
            if segment.is_block:
                in_larger = passed < larger * (size + 1)
                stage = passed // (size + 1) if in_larger else (passed - larger) // size
                passed += 1
            yield position, stage


def _by_flops(segments: Sequence[Segment], stages: int) -> Iterator[tuple[int, int]]:
    """As `_by_blocks`, but a stage ends with the copy that reaches its share of all matmuls' FLOPs.

    It ends earlier if only as many copies with parameters are left as stages, since each has to train something.
    """
    total = sum(segment.count * segment.matmul_flops for segment in segments)
    left = sum(segment.count for segment in segments if segment.num_params)
    stage, passed, trains = 0, 0.0, False
    for position, segment in enumerate(segments):
        for _ in range(segment.count):
            reached = passed >= total * (stage + 1) / stages * (1 - 1e-9)
            if trains and segment.num_params and stage + 1 < stages and (reached or left < stages - stage):
                stage, trains = stage + 1, False
            yield position, stage
            passed += segment.matmul_flops
            left -= segment.num_params > 0
            trains = trains or segment.num_params > 0
