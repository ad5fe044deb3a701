"""Peak bytes of a step, by category, on the device of the pipeline stage that needs the most.

What lives differs from moment to moment, and so does the peak's: at the loss all activations and the logits do, but no
gradients yet; when the last block goes backward few activations and nearly all gradients; when the optimizer steps no
activations at all (Rajbhandari et al. 2020, arXiv 1910.02054, section 3). In between everything changes evenly from
copy to copy of a block, so that the first and the last of each run tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from atorch.cost.profile import Matmul, Segment
from atorch.cost.stages import Stage, heaviest_stages, stages_of
from atorch.cost.state import Cost

SLACK = 0.2
"""Of what comes and goes in a step, the share that a caching allocator reserves beside it: 0.2 to 0.4 in published runs
of Megatron on B200 that tell both. An allocator that runs short gives most of it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one device holds at the peak of a step, in bytes."""

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
        """What tensors hold on the device, all categories but slack: CUDA's `max_memory_allocated`."""
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working

    @property
    def reserved(self) -> float:
        """What the allocator holds: CUDA's `max_memory_reserved`."""
        return self.total + self.slack

    def by_category(self) -> dict[str, float]:
        """Category → bytes, the largest first, without those that hold nothing."""
        held = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("stage", "on_host")}
        return {name: value for name, value in sorted(held.items(), key=lambda item: -item[1]) if value > 0}


class _Moment(NamedTuple):
    """What lives at one moment and not all the time."""

    gradients: float
    activations: float
    transient: float
    working: float


class _Held(NamedTuple):
    """What lives at one moment, by category, and what waits on the host: `Memory` before the peak's moment is known."""

    parameters: float
    gradients: float
    optimizer: float
    masters: float
    activations: float
    buffers: float
    transient: float
    working: float
    on_host: float = 0.0

    @property
    def total(self) -> float:
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working


class _Copy(NamedTuple):
    """One copy of a segment on a device: elements, then bytes of a micro-batch."""

    params: float  # whole, as they are computed with
    stored_params: float  # what is kept of them: a shard
    trained: float  # of params, those that get gradients
    stored_grads: float
    stored_state: float
    kept: float  # activations that wait for backward
    working: float  # what backward needs beside them
    weights: float  # elements of the weights of different shapes


def peak_memory(cost: Cost) -> Memory:
    """The bytes at a step's peak, on the stage that needs the most; `on_host` is of the stage with the most there."""
    scale, stages = _scale(cost), heaviest_stages(cost)
    segments = {id(segment): segment for stage in stages for segment, _ in stage.parts}
    copies = {key: _copy(cost, segment, scale) for key, segment in segments.items()}
    held = [_stage_memory(cost, stage, copies) for stage in stages]
    worst, on_host = max(held, key=lambda memory: memory.total), max(each.on_host for each in held)
    return worst if worst.on_host == on_host else replace(worst, on_host=on_host)


def peak_bytes(cost: Cost) -> float:
    """The sum of `peak_memory`."""
    return peak_memory(cost).total


def stage_memory(cost: Cost, stage: Stage) -> Memory:
    """The bytes at the peak of one stage."""
    return _stage_memory(cost, stage, _copies(cost, stage))


def beside_host(cost: Cost, stage: Stage) -> tuple[Memory, Memory]:
    """The bytes at the peak of one stage were nothing to wait on the host, and as it is."""
    copies = _copies(cost, stage)  # what waits where changes no copy
    on_device = cost.but(param_offload=0.0, optim_offload=0.0, activation_offload=0.0, budget_bytes=math.inf)
    return _stage_memory(on_device, stage, copies), _stage_memory(cost, stage, copies)


def _copies(cost: Cost, stage: Stage) -> dict[int, _Copy]:
    scale = _scale(cost)
    return {id(segment): _copy(cost, segment, scale) for segment, _ in stage.parts}


def host_bytes(cost: Cost) -> float:
    """What waits in host memory for one device, on the stage that has the most there."""
    return max(stage_memory(cost, stage).on_host for stage in stages_of(cost))


def micro_batch_share(cost: Cost) -> float:
    """What a micro-batch of one device is of the traced batch."""
    return cost.batch_size / cost.num_micro_batches / cost.traced_batch


def _stage_memory(cost: Cost, stage: Stage, copies: dict[int, _Copy]) -> Memory:
    parts = [(segment.is_block, number, copies[id(segment)]) for segment, number in stage.parts]
    params = state = trained = 0.0
    for _, number, each in parts:
        params += number * each.stored_params
        state += number * each.stored_state
        trained += number * each.trained
    always = cost.bucket_bytes + cost.bucket_itemsize * trained

    def held(moment: _Moment) -> _Held:
        return _Held(
            parameters=params * cost.param_itemsize,
            gradients=moment.gradients,
            optimizer=state * cost.optim_itemsize,
            masters=state * cost.master_itemsize,
            activations=moment.activations,
            buffers=cost.buffer_bytes,
            transient=moment.transient + always,
            working=moment.working,
        )

    moments = _moments(cost, stage.in_flight, parts)
    if uses_host(cost):
        # What makes way differs from moment to moment, and so the peak's moment is another one with it. Of those that
        # fill a budget the one counts that most makes way for.
        shared = ((moment, _with_host(cost, held(moment))) for moment in moments)
        peak, most = max(shared, key=lambda each: (round(each[1].total), each[1].on_host))
    else:
        peak = max(moments, key=sum)
        most = held(peak)
    slack = SLACK * (peak.activations + peak.transient + peak.working)
    return Memory(stage=stage.index, slack=slack, **most._asdict())


def uses_host(cost: Cost) -> bool:
    """Whether anything may wait in host memory."""
    return bool(cost.param_offload or cost.optim_offload or cost.activation_offload or cost.budget_bytes < math.inf)


def _moments(cost: Cost, in_flight: float, parts: list[tuple[bool, float, _Copy]]) -> Iterator[_Moment]:
    """The moments at which the peak can be, with what lives then: the loss, blocks' backwards, the optimizer's step.

    Gradients that do not keep their place between steps appear one by one in the first backward. Where earlier
    micro-batches were through before the most are in flight, all are there; else they are in the second backward, when
    one micro-batch less is in flight.
    """
    grads = params = kept = state = outside = inside = weights = 0.0
    for is_block, number, each in parts:
        grads += number * each.stored_grads
        params += number * each.params
        kept += number * each.kept
        state += number * each.stored_state
        if is_block:
            weights, inside = max(weights, each.weights), max(inside, each.working)
        else:
            outside = max(outside, each.working)
    all_grads = cost.grad_itemsize * grads
    appear = not cost.grads_persist and cost.num_micro_batches <= in_flight
    always = cost.cast_itemsize * params + cost.placeholder_itemsize * weights
    around, within = _gathered(cost, parts)
    alive = in_flight * kept
    yield _Moment(0.0 if appear else all_grads, alive, always + around, outside)
    if appear and in_flight > 1:
        yield _Moment(all_grads, alive - kept, always + within, max(inside, outside))
    done = fresh = 0.0  # elements of the gradients that this backward has made: as they are kept, and as they are made
    for is_block, number, each in reversed(parts):
        if is_block:
            for turn in (1.0, number):
                made = cost.grad_itemsize * (done + turn * each.stored_grads) if appear else all_grads
                new = cost.fresh_itemsize * (fresh + turn * each.trained)
                yield _Moment(made, alive - (turn - 1.0) * each.kept, always + within + new, each.working)
        alive = max(0.0, alive - number * each.kept)  # sums of parts round
        done += number * each.stored_grads
        fresh += number * each.trained
        if not is_block:
            made = cost.grad_itemsize * done if appear else all_grads
            new = cost.fresh_itemsize * fresh + cost.placeholder_itemsize * each.weights
            yield _Moment(made, alive, always + around + new, each.working)
    yield _Moment(all_grads, 0.0, cost.step_itemsize * state * (1.0 - cost.optim_offload), 0.0)


def _gathered(cost: Cost, parts: list[tuple[bool, float, _Copy]]) -> tuple[float, float]:
    """Bytes of sharded parameters that are whole: outside of blocks, where only what is kept is, and inside.

    Inside, one block computes while the next is gathered, and the gradients of two are whole until they are reduced.
    """
    if not cost.gathered_itemsize:
        return 0.0, 0.0
    block = max((each.params for is_block, _, each in parts if is_block), default=0.0)
    outside = sum(number * each.params for is_block, number, each in parts if not is_block)
    inside = sum(number * each.params for is_block, number, each in parts if is_block)
    two = min(2.0 * block, inside)
    around = outside + (inside if cost.keeps_gathered else 0.0)
    within = 2.0 * two + outside if not cost.keeps_gathered else two + outside + inside
    return cost.gathered_itemsize * around, cost.gathered_itemsize * within


def _copy(cost: Cost, segment: Segment, scale: float) -> _Copy:
    """What a device has of one copy, where `scale` is what its micro-batch is of the traced activations.

    Experts are spread over ranks that see different samples, so that fewer of those are left to shard them further. A
    head that is the embedding is held once more where the embedding is on another stage.
    """
    dense = segment.num_params - segment.split_params - segment.expert_params + segment.split_params / cost.tensor
    if cost.stages > 1 and segment.tied_params:
        dense += segment.tied_params / cost.tensor
    experts = segment.expert_params / cost.expert_divisor
    share = segment.num_trainable / segment.num_params if segment.num_params else 1.0
    outside = scale / cost.tensor if cost.splits_norms else scale
    inside = scale / cost.tensor
    kept = inside * segment.inside.saved_bytes + outside * segment.outside.saved_bytes
    kept += cost.held_gathers * segment.input_bytes * (scale - outside)
    working = segment.working_bytes * (inside if segment.split_working else scale)
    working += (
        2.0 * segment.input_bytes * (scale - outside)
    )  # an input gathered whole, a gradient before it is scattered
    if segment.is_block and cost.recompute:
        again = kept - _kept_when_recomputed(cost, segment, inside, outside)
        kept, working = kept - cost.recompute * again, working + again
    return _Copy(
        params=dense + experts,
        stored_params=_stored(dense, experts, cost.param_shards, cost.expert),
        trained=share * (dense + experts),
        stored_grads=share * _stored(dense, experts, cost.grad_shards, cost.expert),
        stored_state=share * _stored(dense, experts, cost.optim_shards, cost.expert),
        kept=kept,
        working=working,
        weights=_weights(cost, segment) if cost.placeholder_itemsize else 0.0,
    )


def _weights(cost: Cost, segment: Segment) -> float:
    return sum({(each.inner, each.columns): _weight(cost, each) for each in segment.matmuls}.values())


def _weight(cost: Cost, product: Matmul) -> float:
    split = product.split != "none" and not (product.of_experts and cost.expert > 1)
    return product.inner * product.columns / (cost.tensor if split else 1)


def _stored(dense: float, experts: float, shards: float, expert: int) -> float:
    return dense / shards + experts / max(1.0, shards / expert)


def _scale(cost: Cost) -> float:
    """Bytes of a micro-batch's activations on one device against the traced ones, outside of tensor splits."""
    return micro_batch_share(cost) * cost.activation_scale / (cost.sequence * cost.context)


def _kept_when_recomputed(cost: Cost, segment: Segment, inside: float, outside: float) -> float:
    if cost.recompute_keeps == "nothing":
        return 0.0
    selective = inside * segment.inside.selective_bytes + outside * segment.outside.selective_bytes
    if cost.recompute_keeps == "selective":
        return selective
    inputs = outside * segment.input_bytes
    if cost.recompute_keeps == "results":
        return selective + inputs + _scale(cost) * segment.input_bytes * _num_sums(segment)
    return inputs


def _num_sums(segment: Segment) -> float:
    """Products that give the residual stream something to add, which plain backward needs nothing of."""
    return sum(each.count for each in segment.matmuls if each.split == "rows" and not each.of_experts)


def _with_host(cost: Cost, whole: _Held) -> _Held:
    """The shares that are offloaded moved to the host, and what is still beyond the budget: optimizer states first."""
    states, steps = whole.parameters + whole.gradients, whole.optimizer + whole.masters
    waiting, stepped = cost.param_offload * states, cost.optim_offload * steps
    saved = cost.activation_offload * whole.activations
    beyond = whole.total - waiting - stepped - saved - cost.budget_bytes
    if beyond > 0:
        moved = min(beyond, steps - stepped)
        stepped, waiting = stepped + moved, waiting + min(beyond - moved, states - waiting)
    if not waiting + stepped + saved:
        return whole
    state_share = 1 - waiting / states if states else 1.0
    step_share = 1 - stepped / steps if steps else 1.0
    return _Held(
        parameters=whole.parameters * state_share,
        gradients=whole.gradients * state_share,
        optimizer=whole.optimizer * step_share,
        masters=whole.masters * step_share,
        activations=whole.activations - saved,
        buffers=whole.buffers,
        transient=whole.transient,
        working=whole.working,
        on_host=waiting + stepped + saved,
    )
