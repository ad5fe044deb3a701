"""Peak bytes of a step, by category, on the device of the pipeline stage that needs the most.

`moments` knows what lives when; the peak is the largest sum. What makes way to the host differs from moment to moment,
and so the peak's moment is another one with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from atorch.cost.memory_timeline import REMEMBERED, MemoryPoint, StageMemory, courses_of
from atorch.cost.pipeline_stages import StageCost, heaviest_stages, stages_of
from atorch.cost.state import Cost

SLACK = 0.2
"""Of the most that comes and goes at a moment of a step, the share that a caching allocator reserves beside: pieces of
one kind's segments that the next kind does not fit into, and pools of other streams. 0.2 to 0.4 in published runs of
Megatron on B200 that tell both."""
STUCK = 0.4
"""Of slack, what an allocator cannot give back when it runs short: segments with a piece in use. Those that are free as
a whole it returns and asks for anew (`release_cached_blocks` in c10/cuda/CUDACachingAllocator.cpp)."""
RESERVE = 0.05
"""Of a device's memory, what no category counts: CUDA's context, 0.5 GiB; NCCL's buffers, 0.4 GiB for each communicator
of a step (32 channels of 10 + 2 MiB: NVIDIA/nccl issue 1685); and 3 % that an estimate may be wrong by."""


ROUNDING = 1e-9  # of the bytes of moments that fill a budget alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes held by one device at the peak of a step."""

    stage: int = 0
    parameters: float
    gradients: float
    optimizer: float
    masters: float
    activations: float
    buffers: float
    transient: float
    working: float
    slack: float = 0.0  # reserved beside them by the allocator, in pieces that nothing fits into
    on_host: float = 0.0  # beside them, in host memory

    @property
    def total(self) -> float:
        """Bytes of tensors on the device, all categories but slack: CUDA's `max_memory_allocated`."""
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working

    @property
    def reserved(self) -> float:
        """Bytes that the allocator holds where there is room: CUDA's `max_memory_reserved`."""
        return self.total + self.slack

    @property
    def needed(self) -> float:
        """Bytes that the allocator must have: those of tensors, and of slack what it cannot give back."""
        return self.total + STUCK * self.slack

    def by_category(self) -> dict[str, float]:
        """Category → bytes, the largest first, without those that hold nothing."""
        held = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("stage", "on_host")}
        return {name: value for name, value in sorted(held.items(), key=lambda item: -item[1]) if value > 0}


class Held(NamedTuple):
    """Live bytes of one moment, by category, and those on the host: a `Memory` that is quick to make."""

    parameters: float
    gradients: float
    optimizer: float
    masters: float
    activations: float
    buffers: float
    transient: float
    working: float
    on_host: float = 0.0  # of all moments
    stepped: float = 0.0  # the share of the parameters that the host steps
    coming: float = 0.0  # the most that comes and goes at any moment

    @property
    def total(self) -> float:
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working


class _Waiting(NamedTuple):
    """Fields of a cost that decide what waits on the host."""

    param_offload: float
    optim_offload: float
    activation_offload: float
    activations_ahead: float
    budget_bytes: float
    whole_grads: bool


_waiting = attrgetter(*_Waiting._fields)


def peak_memory(cost: Cost) -> Memory:
    """The bytes at a step's peak, on the stage that holds the most.

    `on_host` is of the stage with the most there, and slack is such that `needed` is of the stage that needs the most.
    """
    stages = heaviest_stages(cost)
    peaks = [held for _, held in _peaks(cost, stages)]
    stage, held = max(zip(stages, peaks, strict=True), key=lambda each: each[1].total)
    if len(peaks) > 1:
        needed = max(each.total + STUCK * SLACK * each.coming for each in peaks)
        held = held._replace(coming=(needed - held.total) / (STUCK * SLACK))
    return _memory(stage, held, on_host=max(each.on_host for each in peaks))


def peak_bytes(cost: Cost) -> float:
    return max(held.total for _, held in _peaks(cost, heaviest_stages(cost)))


def stage_memory(cost: Cost, stage: StageCost) -> Memory:
    ((_, held),) = _peaks(cost, (stage,))
    return _memory(stage, held, on_host=held.on_host)


def beside_host(cost: Cost, stages: Sequence[StageCost]) -> list[tuple[StageMemory, Held]]:
    """Live bytes on each of some stages were nothing to wait on the host, and those held at the peak."""
    courses = courses_of(cost, stages)
    return [(course, held) for course, (_, held) in zip(courses, _peaks_of(cost, courses), strict=True)]


def host_bytes(cost: Cost) -> float:
    """Bytes in host memory for one device, on the stage that has the most there."""
    return max(held.on_host for _, held in _peaks(cost, stages_of(cost)))


def least_on_host(cost: Cost) -> float:
    """Bytes of parameters, masters and optimizer states on the host at any moment, on a stage that has the most."""
    waiting = _Waiting._make(_waiting(cost))

    def of_stage(course: StageMemory) -> float:
        steps = course.optimizer + course.masters
        shares = waiting.param_offload * course.parameters + waiting.optim_offload * steps
        return max(shares, course.parameters + steps - waiting.budget_bytes)

    return max(of_stage(course) for course in courses_of(cost, heaviest_stages(cost)))


def uses_host(cost: Cost) -> bool:
    return bool(cost.param_offload or cost.optim_offload or cost.activation_offload or cost.budget_bytes < math.inf)


def _memory(stage: StageCost, held: Held, on_host: float) -> Memory:
    categories = dict(zip(Held._fields[:8], held, strict=False))
    return Memory(
        **categories,
        stage=stage.index,
        slack=SLACK * held.coming,
        on_host=on_host,
    )


def _peaks(cost: Cost, stages: Sequence[StageCost]) -> list[tuple[MemoryPoint, Held]]:
    return _peaks_of(cost, courses_of(cost, stages))


def _peaks_of(cost: Cost, courses: Sequence[StageMemory]) -> list[tuple[MemoryPoint, Held]]:
    """The moment of each stage's peak, and what is held then."""
    if not uses_host(cost):
        return [(course.peak, _on_device(course, course.peak, cost.buffer_bytes)) for course in courses]
    waiting = _Waiting._make(_waiting(cost))
    return [_peak_beside_host(course, cost.buffer_bytes, waiting) for course in courses]


@lru_cache(maxsize=REMEMBERED)
def _peak_beside_host(course: StageMemory, buffer_bytes: float, waiting: _Waiting) -> tuple[MemoryPoint, Held]:
    """The fullest moment, of equals the one that most makes way for."""
    *passes, step = course.moments
    if waiting.activation_offload:
        passes += course.in_backward  # when blocks' activations are back that were away before
    step = step._replace(transient=step.transient * (1.0 - waiting.optim_offload))
    shared = [(moment, _with_host(course, moment, buffer_bytes, waiting)) for moment in (*passes, step)]
    full = max(held.total for _, held in shared) * (1 - ROUNDING)
    fullest = [each for each in shared if each[1].total >= full]
    moment, held = max(fullest, key=lambda each: (each[1].on_host, -each[1].parameters))
    coming = max(each.activations + each.transient + each.working for _, each in shared)
    return moment, held._replace(coming=coming - course.buckets)


def _on_device(course: StageMemory, moment: MemoryPoint, buffer_bytes: float) -> Held:
    return Held(
        course.parameters,
        moment.gradients,
        course.optimizer,
        course.masters,
        moment.activations,
        buffer_bytes,
        moment.transient + course.buckets,
        moment.working,
        coming=course.coming,
    )


def _with_host(course: StageMemory, moment: MemoryPoint, buffer_bytes: float, shares: _Waiting) -> Held:
    """Bytes left when shares, or what is beyond a budget, made way to the host."""
    saved = _saved_away(course, moment, shares)
    if shares.budget_bytes < math.inf:
        return _under_budget(course, moment, buffer_bytes, shares, saved)
    waiting, stepped = shares.param_offload, shares.optim_offload
    moved = waiting * (course.parameters + course.stepped_gradients) + stepped * (course.optimizer + course.masters)
    # The host steps copies of what does not wait there; masters have gradients of their own while they are stepped.
    copied = course.stepped_parameters + course.stepped_gradients
    copies = max(0.0, stepped - waiting) * copied + stepped * course.masters
    # Whole gradients stay until they are reduced: what goes is this device's shard.
    leaving = 0.0 if shares.whole_grads else waiting
    return Held(
        course.parameters * (1 - waiting),
        moment.gradients * (1 - leaving),
        course.optimizer * (1 - stepped),
        course.masters * (1 - stepped),
        moment.activations - saved,
        buffer_bytes,
        moment.transient + course.buckets,
        moment.working,
        on_host=moved + copies + shares.activation_offload * course.in_blocks,
        stepped=stepped,
    )


def _saved_away(course: StageMemory, moment: MemoryPoint, shares: _Waiting) -> float:
    """The part of what blocks saved that the host has: its share of every micro-batch, less what is back afterwards.

    Of the micro-batch that goes backward the blocks that stay are the first to go. At the end of a run of blocks more
    is back than the last one has, which stands for those just before it.
    """
    if not (shares.activation_offload and moment.in_blocks):
        return 0.0
    one = course.in_blocks / course.in_flight
    num_whole = math.floor(moment.in_blocks / one * (1 + ROUNDING))
    away = shares.activation_offload * one
    total = num_whole * away + min(away, max(0.0, moment.in_blocks - num_whole * one))
    return total if moment.in_blocks == course.in_blocks else total - shares.activations_ahead * one


def _under_budget(
    course: StageMemory, moment: MemoryPoint, buffer_bytes: float, shares: _Waiting, saved: float
) -> Held:
    """Chunks that the host steps keep all they have there; parameters stay on the device as long as there is room.

    Of those chunks gradients go down as they are made, and parameters have a copy on the host wherever else they are.
    """
    whole, states = _on_device(course, moment, buffer_bytes), course.optimizer + course.masters
    stepped, beside = shares.optim_offload, states + moment.gradients
    beyond = whole.total - stepped * beside - saved - shares.budget_bytes
    waiting = 0.0
    if beyond > 0:
        moved = min(beyond, (1 - stepped) * beside)
        stepped = min(1.0, stepped + moved / beside) if beside else 1.0
        waiting = min(beyond - moved, course.parameters)
    return Held(
        course.parameters - waiting,
        moment.gradients * (1 - stepped),
        course.optimizer * (1 - stepped),
        course.masters * (1 - stepped),
        moment.activations - saved,
        buffer_bytes,
        moment.transient + course.buckets,
        moment.working,
        on_host=stepped * (states + course.parameters + course.gradients)
        + shares.activation_offload * course.in_blocks,
        stepped=stepped,
    )
