"""Live bytes on a pipeline stage over the moments of a step, were nothing to wait on the host.

What lives differs from moment to moment, and so does the peak's: at the loss all activations and the logits do, but no
gradients yet; when the last block goes backward few activations and nearly all gradients; when the optimizer steps no
activations at all (Rajbhandari et al. 2020, arXiv 1910.02054, section 3). In between everything changes evenly from
copy to copy of a block, so that the first and the last of each run tell.

A search asks for the same stages again and again, under costs that differ in what waits on the host or is sent. Moments
follow from `Terms` alone, so that each is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

from atorch.cost.experts import busiest_load, kept_elements, saved_bytes
from atorch.cost.pipeline_stages import StageCost
from atorch.cost.profile import Matmul, Segment
from atorch.cost.state import Cost, RecomputePolicy

REMEMBERED = 2**14  # stages, in some tens of MB: a search comes back to many, and not to those of long ago


class MemoryPoint(NamedTuple):
    """Bytes that live at one moment and not all the time."""

    gradients: float
    activations: float
    transient: float
    working: float
    in_blocks: float = 0.0  # of the activations, those that blocks saved

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.transient + self.working


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes that live all the time, and then from moment to moment."""

    parameters: float
    optimizer: float
    masters: float
    buckets: float
    stepped_parameters: float  # of what this device steps
    stepped_gradients: float
    passes: tuple[MemoryPoint, ...]  # moments of forward and backward
    step: MemoryPoint  # of the optimizer
    peak: MemoryPoint
    coming: float  # the most that comes and goes at any moment
    in_flight: float  # micro-batches

    @cached_property
    def moments(self) -> tuple[MemoryPoint, ...]:
        """Moments of forward and backward that can be the peak, whatever waits on the host, then the optimizer step."""
        return (*_uncovered(self.passes), self.step)

    @cached_property
    def in_backward(self) -> tuple[MemoryPoint, ...]:
        """While some blocks have gone backward and others have not."""
        most = max(moment.in_blocks for moment in self.passes)
        return tuple(_uncovered([moment for moment in self.passes if 0 < moment.in_blocks < most]))

    @property
    def gradients(self) -> float:
        return self.step.gradients

    @property
    def in_blocks(self) -> float:
        """The most that blocks have saved for backward at any moment."""
        return max(moment.in_blocks for moment in self.passes)


class Terms(NamedTuple):
    """Fields of a cost that decide bytes on a device before anything makes way to the host."""

    param_itemsize: float
    grad_itemsize: float
    optim_itemsize: float
    master_itemsize: float
    param_shards: float
    grad_shards: float
    optim_shards: float
    fresh_itemsize: float
    cast_itemsize: float
    gathered_itemsize: float
    keeps_gathered: bool
    bucket_bytes: float
    bucket_itemsize: float
    step_itemsize: float
    placeholder_itemsize: float
    held_gathers: float
    tensor: int
    splits_norms: bool
    expert: int
    expert_capacity: float
    expert_skew: float
    expert_divisor: float
    stages: int
    recompute: float
    recompute_keeps: RecomputePolicy
    whole_outside: bool
    own_tokens: bool
    gathers_logits: bool
    scale: float  # bytes of a micro-batch's activations on one device against the traced ones, outside tensor splits
    whole_scale: float  # the same with all tokens of a sequence


_terms = attrgetter(*Terms._fields[:-2])


class _Copy(NamedTuple):
    """One copy of a segment on a device: elements, then bytes of a micro-batch."""

    params: float  # whole, as they are computed with
    stored_bytes: float  # what is kept of them: a shard
    cast: float  # of params, those that are cast for use
    gathered_bytes: float  # of params, whole, where shards of them are kept
    trained: float  # of params, those that get gradients
    stored_grads: float
    stored_state: float
    kept: float  # activations that wait for backward
    again: float  # of those, what is not kept because it is recomputed
    results: float  # of products, whose gradients those of weights are computed from
    working: float  # what backward needs beside them
    weights: float  # elements of the weights of different shapes


def micro_batch_share(cost: Cost) -> float:
    """The share of a micro-batch of one device in the traced batch."""
    return cost.batch_size / cost.num_micro_batches / cost.traced_batch


def courses_of(cost: Cost, stages: Iterable[StageCost]) -> list[StageMemory]:
    """Live bytes on each of some stages during a step."""
    whole = micro_batch_share(cost) * cost.activation_scale
    scale = whole / (cost.sequence * cost.context)
    terms = Terms._make((*_terms(cost), scale, whole))
    # Gradients that do not keep their place between steps appear one by one in the first backward. Where earlier
    # micro-batches were through before the most are in flight, all are there.
    least = math.inf if cost.grads_persist else cost.num_micro_batches
    piece = 1.0 / cost.interleave
    return [_course(terms, stage, stage.in_flight >= least, piece) for stage in stages]


@lru_cache(maxsize=REMEMBERED)
def _course(terms: Terms, stage: StageCost, appear: bool, piece: float) -> StageMemory:
    copies = [(segment.is_block, number, _copy(terms, segment)) for segment, number in stage.parts]
    params = state = trained = 0.0
    for _, number, each in copies:
        params += number * each.stored_bytes
        state += number * each.stored_state
        trained += number * each.trained
    *passes, step = moments = tuple(_moments(terms, copies, stage, appear, piece))
    return StageMemory(
        parameters=params,
        optimizer=state * terms.optim_itemsize,
        masters=state * terms.master_itemsize,
        buckets=terms.bucket_bytes + terms.bucket_itemsize * trained,
        stepped_parameters=state * terms.param_itemsize,
        stepped_gradients=state * terms.grad_itemsize,
        passes=tuple(passes),
        step=step,
        peak=max(moments, key=attrgetter("total")),
        coming=max(moment.total - moment.gradients for moment in moments),
        in_flight=stage.in_flight,
    )


def _uncovered(moments: Sequence[MemoryPoint]) -> Iterator[MemoryPoint]:
    """Moments without another at which as much of everything lives: whatever makes way, the others are no peaks."""
    for index, each in enumerate(moments):
        covering = (
            other.gradients >= each.gradients
            and other.activations >= each.activations
            and other.activations - other.in_blocks >= each.activations - each.in_blocks
            and other.transient >= each.transient
            and other.working >= each.working
            and (place < index or other != each)  # of equal ones the first
            for place, other in enumerate(moments)
            if place != index
        )
        if not any(covering):
            yield each


def _moments(
    terms: Terms, parts: list[tuple[bool, float, _Copy]], stage: StageCost, appear: bool, piece: float
) -> Iterator[MemoryPoint]:
    """The loss, blocks' backwards, the optimizer's step.

    In the second backward, where no forward comes between, one micro-batch less is in flight: one piece of it, of which
    a stage has several where it is interleaved. Where gradients appear in the first backward, all are there then. What
    waits for weights' gradients has those of what products made. Recomputed it is there whole, as is all that is in
    flight and one more: simulated with 4 stages, within 11 %.
    """
    in_flight, waiting = stage.in_flight, stage.waiting
    grads = cast = kept = in_blocks = state = outside = weights = held = 0.0
    for is_block, number, each in parts:
        grads += number * each.stored_grads
        cast += number * each.cast
        kept += number * each.kept
        state += number * each.stored_state
        held += number * (waiting * each.results + ((in_flight + 1.0) * each.again if waiting else 0.0))
        if is_block:
            weights = max(weights, each.weights)
            in_blocks += number * each.kept
        else:
            outside = max(outside, each.working)
    all_grads = terms.grad_itemsize * grads
    casts = 1.0 + max(0.0, in_flight - 1.0) * (1.0 - terms.recompute)  # autocast's, which backward keeps
    always = casts * terms.cast_itemsize * cast + terms.placeholder_itemsize * weights
    around, within = _gathered(terms, parts)
    alive, saved = in_flight * kept + held, in_flight * in_blocks
    yield MemoryPoint(0.0 if appear else all_grads, alive, always + around, outside, saved)
    again = in_flight > 1
    first, first_in_blocks = piece * kept, piece * in_blocks
    if again:
        yield MemoryPoint(all_grads, alive - first, always + around, outside, saved - first_in_blocks)
    done = fresh = 0.0  # elements of the gradients that this backward has made: as they are kept, and as they are made
    for is_block, number, each in reversed(parts):
        if is_block:
            for turn in (1.0, number):
                made = terms.grad_itemsize * (done + turn * each.stored_grads) if appear else all_grads
                new = terms.fresh_itemsize * (fresh + turn * each.trained)
                gone = (turn - 1.0) * each.kept
                yield MemoryPoint(made, alive - gone, always + within + new, each.working, saved - gone)
                if again:
                    left = max(0.0, alive - first - gone), max(0.0, saved - first_in_blocks - gone)
                    yield MemoryPoint(all_grads, left[0], always + within + new, each.working, left[1])
            saved = max(0.0, saved - number * each.kept)
        alive = max(0.0, alive - number * each.kept)  # sums of parts round
        done += number * each.stored_grads
        fresh += number * each.trained
        if not is_block:
            made = terms.grad_itemsize * done if appear else all_grads
            new = terms.fresh_itemsize * fresh + terms.placeholder_itemsize * each.weights
            yield MemoryPoint(made, alive, always + around + new, each.working, saved)
            if again:
                left = max(0.0, alive - first), max(0.0, saved - first_in_blocks)
                yield MemoryPoint(all_grads, left[0], always + around + new, each.working, left[1])
    yield MemoryPoint(all_grads, 0.0, terms.step_itemsize * state, 0.0)


def _gathered(terms: Terms, parts: list[tuple[bool, float, _Copy]]) -> tuple[float, float]:
    """Bytes of sharded parameters that are whole: outside of blocks, where only what is kept is, and inside.

    Inside, one block computes while the next is gathered, and the gradients of two are whole until they are reduced.
    """
    if not terms.gathered_itemsize:
        return 0.0, 0.0
    block = max((each.gathered_bytes for is_block, _, each in parts if is_block), default=0.0)
    trained = max((each.trained for is_block, _, each in parts if is_block), default=0.0)
    outside = sum(number * each.gathered_bytes for is_block, number, each in parts if not is_block)
    inside = sum(number * each.gathered_bytes for is_block, number, each in parts if is_block)
    in_blocks = sum(number * each.trained for is_block, number, each in parts if is_block)
    gradients = terms.gathered_itemsize * min(2.0 * trained, in_blocks)
    if terms.keeps_gathered:
        return outside + inside, outside + inside + gradients
    return outside, outside + min(2.0 * block, inside) + gradients


def has_all_tokens(cost: Cost | Terms, segment: Segment) -> bool:
    """True if every rank along sequence and context has all tokens of a segment, as it may outside of blocks."""
    is_whole = not cost.own_tokens or segment.needs_all_tokens
    return cost.whole_outside and not segment.is_block and is_whole


def is_gathered(cost: Cost | Terms, segment: Segment) -> bool:
    """True if a head's results are brought together from the tensor ranks, as for a loss that is no cross entropy."""
    return cost.whole_outside and not segment.is_block and (cost.gathers_logits or not segment.num_losses)


@lru_cache(maxsize=REMEMBERED)
def _copy(terms: Terms, segment: Segment) -> _Copy:
    """The part of one copy on a device.

    Experts are spread over ranks that see different samples, so that fewer of those are left to shard them further. A
    head that is the embedding is held once more where the embedding is on another stage.
    """
    dense = segment.num_params - segment.split_params - segment.expert_params + segment.split_params / terms.tensor
    if terms.stages > 1 and segment.tied_params:
        dense += segment.tied_params / terms.tensor
    experts = segment.expert_params / terms.expert_divisor
    share = segment.num_trainable / segment.num_params if segment.num_params else 1.0
    is_whole, scale = False, terms.scale
    if not segment.is_block:
        is_whole, scale = terms.whole_outside, terms.whole_scale if has_all_tokens(terms, segment) else scale
    outside = scale / terms.tensor if terms.splits_norms and not is_whole else scale
    inside = scale if is_gathered(terms, segment) else scale / terms.tensor
    kept = inside * segment.inside.saved_bytes + outside * segment.outside.saved_bytes
    kept += terms.held_gathers * segment.input_bytes * (scale - outside)
    if segment.dispatched_bytes:
        capacity, skew = terms.expert_capacity, terms.expert_skew
        load = busiest_load(segment, scale, ranks=terms.expert, capacity=capacity, skew=skew)
        kept = max(0.0, kept + (load - 1.0) * inside * saved_bytes(segment))
    working = segment.working_bytes * (inside if segment.split_working else scale)
    # An input gathered whole, a gradient before it is scattered.
    working += 2.0 * segment.input_bytes * (scale - outside)
    again = 0.0
    if segment.is_block and terms.recompute:
        again = kept - _kept_when_recomputed(terms, segment, inside, outside)
        kept, working = kept - terms.recompute * again, working + max(0.0, again)
        again = terms.recompute * max(0.0, again)
    whole = dense + experts
    results = inside * segment.inside.selective_bytes + outside * segment.outside.selective_bytes
    return _Copy(
        params=whole,
        stored_bytes=kept_elements(dense, experts, terms.param_shards, terms.expert)
        * segment.mean_itemsize(terms.param_itemsize),
        cast=share * whole if 0.0 < segment.frozen_itemsize <= terms.cast_itemsize else whole,
        gathered_bytes=whole * segment.sent_itemsize(terms.gathered_itemsize),
        trained=share * whole,
        stored_grads=share * kept_elements(dense, experts, terms.grad_shards, terms.expert),
        stored_state=share * kept_elements(dense, experts, terms.optim_shards, terms.expert),
        kept=kept,
        again=again,
        results=results,
        working=working + _made_whole(terms, segment) + segment.early_gradient_bytes,
        weights=_weights(terms, segment) if terms.placeholder_itemsize else 0.0,
    )


def _weights(terms: Terms, segment: Segment) -> float:
    trained = (each for each in segment.matmuls if each.trainable)
    return sum({(each.inner, each.columns): _weight(terms, each) for each in trained}.values())


def _made_whole(terms: Terms, segment: Segment) -> float:
    """Bytes of the largest quantized weight in 16 bits, as a product needs it."""
    return max((2.0 * _weight(terms, each) for each in segment.matmuls if each.stored_itemsize), default=0.0)


def _weight(terms: Terms, product: Matmul) -> float:
    split = product.split != "none" and not (product.of_experts and terms.expert > 1)
    return product.inner * product.columns / (terms.tensor if split else 1)


def _kept_when_recomputed(terms: Terms, segment: Segment, inside: float, outside: float) -> float:
    if terms.recompute_keeps == "nothing":
        return 0.0
    selective = inside * segment.inside.selective_bytes + outside * segment.outside.selective_bytes
    if terms.recompute_keeps == "selective":
        return selective
    inputs = outside * segment.input_bytes
    if terms.recompute_keeps == "scores":
        saved = inside * (segment.inside.saved_bytes - segment.scores_bytes)
        return saved + outside * segment.outside.saved_bytes
    if terms.recompute_keeps == "every second":
        return inputs + (selective + terms.scale * segment.input_bytes * _num_sums(segment)) / 2.0
    if terms.recompute_keeps == "results":
        return selective + inputs + terms.scale * segment.input_bytes * _num_sums(segment)
    return inputs


def _num_sums(segment: Segment) -> float:
    """Products that give the residual stream something to add, which plain backward needs nothing of."""
    return sum(each.count for each in segment.matmuls if each.split == "rows" and not each.of_experts)
