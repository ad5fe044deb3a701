"""Peak bytes of a step, by category, on the device of the pipeline stage that needs the most.

`memory_timeline` lists the live bytes of each moment; the peak is the largest sum. Offloading to the host moves
different bytes at different moments, so it can also change which moment is the peak.

An estimate's error is the logarithm of measured over estimated bytes. If kind k has the share w_k of a peak, its
variance is s² = own² + Σ (w_k · sigma_k)², as for a step's seconds (`uncertainty`). Bytes per parameter are known
almost exactly, activations and working memory less well, and the allocator's slack least.

Sigmas are fitted to published runs, each source left out in turn. The runs used are those whose bytes torch counted
and whose columns list the kept tensors. `python benchmarks/planner_accuracy.py TABLE.csv … --leave-one-out` repeats the
fit and prints the coverage of bands. The priors are as for seconds: around 0.02 for states, 0.1 for activations and
working memory, and 0.3 for slack, each within a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from atorch.cost.memory_timeline import REMEMBERED, MemoryPoint, StageMemory, timelines_of
from atorch.cost.pipeline_stages import StageCost, heaviest_stages, stages_of
from atorch.cost.state import Cost

SLACK = 0.2
"""Bytes that a caching allocator reserves in addition, as a share of the most transient bytes at any moment. They are
fragments that the next kind of tensor does not fit into, and pools of other streams. Published runs of Megatron on B200
that report both have 0.2 to 0.4."""
STUCK = 0.4
"""Share of slack that an allocator cannot release when it runs short: segments with a piece in use. Segments that are
free as a whole it releases (`release_cached_blocks` in c10/cuda/CUDACachingAllocator.cpp)."""
RESERVE = 0.05
"""Share of a device's memory that no category counts: CUDA's context, 0.5 GiB; NCCL's buffers, 0.4 GiB for each
communicator of a step (32 channels of 10 + 2 MiB: NVIDIA/nccl issue 1685); and 3 % for the error of an estimate."""


ROUNDING = 1e-9  # relative; moments that differ by less in bytes count as equal


class Memory(NamedTuple):
    """Bytes held by one device at the peak of a step, or at another moment, by category."""

    parameters: float
    gradients: float
    optimizer: float
    masters: float
    activations: float
    buffers: float
    transient: float
    working: float
    on_host: float = 0.0  # in host memory, not part of the total; the same at all moments
    stepped: float = 0.0  # share of the parameters that the host steps
    max_transient: float = 0.0  # the most transient bytes at any moment
    stage: int = 0

    @property
    def total(self) -> float:
        """Bytes of tensors on the device, all categories but slack: CUDA's `max_memory_allocated`."""
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working

    @property
    def slack(self) -> float:
        """Bytes that the allocator reserves in addition, in fragments that nothing fits into."""
        return SLACK * self.max_transient

    @property
    def reserved(self) -> float:
        """Bytes that the allocator holds if memory suffices: CUDA's `max_memory_reserved`."""
        return self.total + self.slack

    @property
    def needed(self) -> float:
        """Bytes that the allocator must have: all tensors, and the slack that it cannot release."""
        return self.total + STUCK * self.slack

    def by_category(self) -> dict[str, float]:
        """Category → bytes, the largest first, without empty categories."""
        held = {name: getattr(self, name) for name in (*CATEGORIES, "slack")}
        return {name: value for name, value in sorted(held.items(), key=lambda item: -item[1]) if value > 0}


CATEGORIES = Memory._fields[:8]


class _OffloadTerms(NamedTuple):
    """Fields of a cost that decide offloading to the host."""

    param_offload: float
    optim_offload: float
    activation_offload: float
    activations_ahead: float
    budget_bytes: float
    whole_grads: bool
    offloads_gradients: bool


_offload_terms = attrgetter(*_OffloadTerms._fields)


def peak_memory(cost: Cost) -> Memory:
    """The bytes at a step's peak, on the stage that holds the most.

    `on_host` is the maximum over stages. Slack is set so that `needed` is the maximum over stages.
    """
    stages = heaviest_stages(cost)
    peaks = _peaks(cost, stages)
    stage, held = max(zip(stages, peaks, strict=True), key=lambda pair: pair[1].total)
    if len(peaks) > 1:
        needed = max(peak.total + STUCK * SLACK * peak.max_transient for peak in peaks)
        held = held._replace(max_transient=(needed - held.total) / (STUCK * SLACK))
    return held._replace(stage=stage.index, on_host=max(peak.on_host for peak in peaks))


def peak_bytes(cost: Cost) -> float:
    return max(held.total for held in _peaks(cost, heaviest_stages(cost)))


def stage_memory(cost: Cost, stage: StageCost) -> Memory:
    (held,) = _peaks(cost, (stage,))
    return held._replace(stage=stage.index)


def with_offload(cost: Cost, stages: Sequence[StageCost]) -> list[tuple[StageMemory, Memory]]:
    """Timelines of stages without offloading, and the bytes held at each peak with it."""
    timelines = timelines_of(cost, stages)
    return list(zip(timelines, _peaks_of(cost, timelines), strict=True))


def host_bytes(cost: Cost) -> float:
    return max(held.on_host for held in _peaks(cost, stages_of(cost)))


def least_on_host(cost: Cost) -> float:
    """Lower bound of the bytes of parameters, masters and optimizer states on the host, the maximum over stages."""
    offload = _OffloadTerms._make(_offload_terms(cost))

    def of_stage(timeline: StageMemory) -> float:
        steps = timeline.optimizer + timeline.masters
        shares = offload.param_offload * timeline.parameters + offload.optim_offload * steps
        return max(shares, timeline.parameters + steps - offload.budget_bytes)

    return max(of_stage(timeline) for timeline in timelines_of(cost, heaviest_stages(cost)))


def uses_host(cost: Cost) -> bool:
    return bool(cost.param_offload or cost.optim_offload or cost.activation_offload or cost.budget_bytes < math.inf)


def _peaks(cost: Cost, stages: Sequence[StageCost]) -> list[Memory]:
    return _peaks_of(cost, timelines_of(cost, stages))


def _peaks_of(cost: Cost, timelines: Sequence[StageMemory]) -> list[Memory]:
    if not uses_host(cost):
        return [_on_device(timeline, timeline.peak, cost.buffer_bytes) for timeline in timelines]
    offload = _OffloadTerms._make(_offload_terms(cost))
    return [_peak_with_host(timeline, cost.buffer_bytes, offload) for timeline in timelines]


@lru_cache(maxsize=REMEMBERED)
def _peak_with_host(timeline: StageMemory, buffer_bytes: float, offload: _OffloadTerms) -> Memory:
    """The fullest moment; of equals the one with the most bytes on the host."""
    *passes, step = timeline.moments
    if offload.activation_offload:
        passes += timeline.in_backward  # when offloaded activations of blocks are back on the device
    step = step._replace(transient=step.transient * (1.0 - offload.optim_offload))
    shared = [(moment, _with_host(timeline, moment, buffer_bytes, offload)) for moment in (*passes, step)]
    full = max(held.total for _, held in shared) * (1 - ROUNDING)
    fullest = [pair for pair in shared if pair[1].total >= full]
    _, held = max(fullest, key=lambda pair: (pair[1].on_host, -pair[1].parameters))
    max_transient = max(live.activations + live.transient + live.working for _, live in shared)
    return held._replace(max_transient=max_transient - timeline.buckets)


def _on_device(timeline: StageMemory, moment: MemoryPoint, buffer_bytes: float) -> Memory:
    return Memory(
        timeline.parameters,
        moment.gradients,
        timeline.optimizer,
        timeline.masters,
        moment.activations,
        buffer_bytes,
        moment.transient + timeline.buckets,
        moment.working,
        max_transient=timeline.max_transient,
    )


def _with_host(timeline: StageMemory, moment: MemoryPoint, buffer_bytes: float, shares: _OffloadTerms) -> Memory:
    """Bytes of a moment after shares, or all that exceeds a budget, moved to the host."""
    saved = _offloaded_activations(timeline, moment, shares)
    if shares.budget_bytes < math.inf:
        return _under_budget(timeline, moment, buffer_bytes, shares, saved)
    waiting, stepped = shares.param_offload, shares.optim_offload
    moved = waiting * (timeline.parameters + timeline.stepped_gradients) + stepped * (
        timeline.optimizer + timeline.masters
    )
    # The host steps copies of parameters that stay on the device; masters have gradients of their own meanwhile.
    copied = timeline.stepped_parameters + timeline.stepped_gradients
    copies = max(0.0, stepped - waiting) * copied + stepped * timeline.masters
    # Full gradients stay until they are reduced; only this device's shard is offloaded.
    leaving = 0.0 if shares.whole_grads else max(waiting, stepped * shares.offloads_gradients)
    return _on_device(timeline, moment, buffer_bytes)._replace(
        parameters=timeline.parameters * (1 - waiting),
        gradients=moment.gradients * (1 - leaving),
        optimizer=timeline.optimizer * (1 - stepped),
        masters=timeline.masters * (1 - stepped),
        activations=moment.activations - saved,
        on_host=moved + copies + shares.activation_offload * timeline.in_blocks,
        stepped=stepped,
    )


def _offloaded_activations(timeline: StageMemory, moment: MemoryPoint, shares: _OffloadTerms) -> float:
    """Bytes of blocks' activations on the host: its share of every micro-batch, less what backward has fetched back.

    The micro-batch in backward releases the blocks kept on the device first. At the end of a run of blocks more is back
    than the last block saved; the figure then represents the blocks just before it.
    """
    if not (shares.activation_offload and moment.in_blocks):
        return 0.0
    one = timeline.in_blocks / timeline.in_flight
    num_whole = math.floor(moment.in_blocks / one * (1 + ROUNDING))
    away = shares.activation_offload * one
    total = num_whole * away + min(away, max(0.0, moment.in_blocks - num_whole * one))
    return total if moment.in_blocks == timeline.in_blocks else total - shares.activations_ahead * one


def _under_budget(
    timeline: StageMemory, moment: MemoryPoint, buffer_bytes: float, shares: _OffloadTerms, saved: float
) -> Memory:
    """Offload whole chunks: the host holds their states, while parameters stay on the device as long as there is room.

    Gradients of those chunks move to the host as they are computed, and the host always has a copy of their parameters.
    """
    whole, states = _on_device(timeline, moment, buffer_bytes), timeline.optimizer + timeline.masters
    stepped, beside = shares.optim_offload, states + moment.gradients
    beyond = whole.total - stepped * beside - saved - shares.budget_bytes
    waiting = 0.0
    if beyond > 0:
        moved = min(beyond, (1 - stepped) * beside)
        stepped = min(1.0, stepped + moved / beside) if beside else 1.0
        waiting = min(beyond - moved, timeline.parameters)
    return whole._replace(
        parameters=timeline.parameters - waiting,
        gradients=moment.gradients * (1 - stepped),
        optimizer=timeline.optimizer * (1 - stepped),
        masters=timeline.masters * (1 - stepped),
        activations=moment.activations - saved,
        on_host=stepped * (states + timeline.parameters + timeline.gradients)
        + shares.activation_offload * timeline.in_blocks,
        stepped=stepped,
    )


SIGMA: Mapping[str, float] = {"states": 0.013, "activations": 0.045, "working": 0.067, "slack": 0.42}
OWN = 0.02  # of every peak: sizes are rounded, figures are published to 0.1 GiB
LOW, HIGH = -1.48, 2.78  # quantiles of errors over s; four of five errors lie between them

_KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("parameters", "gradients", "optimizer", "masters", "buffers"), "states"),
    **{"activations": "activations", "transient": "working", "working": "working", "slack": "slack"},
}


def memory_shares(memory: Mapping[str, float]) -> tuple[float, ...]:
    """The share of each kind of `SIGMA` in bytes by category."""
    held = dict.fromkeys(SIGMA, 0.0)
    for category, size in memory.items():
        held[_KIND_OF[category]] += size
    whole = sum(held.values())
    return tuple(size / whole if whole else 0.0 for size in held.values())


def high_needed(memory: Memory) -> float:
    """Bytes that nine of ten runs with this estimate need at most."""
    held = dict(zip(CATEGORIES, memory, strict=False))
    return memory_band({**held, "slack": memory.needed - memory.total})[1]


def memory_band(memory: Mapping[str, float]) -> tuple[float, float]:
    """The interval of bytes that contains four of five peaks with this estimate by category."""
    shares = zip(memory_shares(memory), SIGMA.values(), strict=True)
    spread = math.sqrt(OWN**2 + sum((share * sigma) ** 2 for share, sigma in shares))
    whole = sum(memory.values())
    return whole * math.exp(LOW * spread), whole * math.exp(HIGH * spread)
