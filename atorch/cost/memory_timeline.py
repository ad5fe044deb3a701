"""Live bytes on a pipeline stage over the moments of a step, without offloading.

The live tensors change during a step. At the loss all activations and the logits are live, but no gradients yet. In the
last block's backward few activations and nearly all gradients are live; in the optimizer's step no activations
(Rajbhandari et al. 2020, arXiv 1910.02054, section 3). Within a run of equal blocks the bytes change linearly, so the
first and the last copy of each run suffice.

A search evaluates the same stages many times, under costs that differ in offloading or communication. Moments depend on
`Terms` alone, so each is computed once and cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import NamedTuple

from atorch.cost.pipeline_stages import StageCost
from atorch.cost.profile import Fp8Weights, Matmul, Segment, busiest_load, expert_saved_bytes, kept_elements
from atorch.cost.state import Cost, RecomputePolicy

REMEMBERED = 2**14  # stages, in some tens of MB: a search returns to many of the recent ones


class MemoryPoint(NamedTuple):
    """Live bytes of one moment that change during a step."""

    gradients: float
    activations: float
    transient: float
    working: float
    in_blocks: float = 0.0  # the part of the activations that blocks saved

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.transient + self.working


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Constant bytes of a stage, and those that change from moment to moment."""

    parameters: float
    optimizer: float
    masters: float
    buckets: float
    stepped_parameters: float  # of the elements that this device steps
    stepped_gradients: float
    passes: tuple[MemoryPoint, ...]  # moments of forward and backward
    step: MemoryPoint  # of the optimizer
    peak: MemoryPoint
    max_transient: float  # the most transient bytes at any moment
    in_flight: float  # micro-batches

    @cached_property
    def moments(self) -> tuple[MemoryPoint, ...]:
        """Moments of forward and backward that can be the peak under any offloading, then the optimizer step."""
        return (*_uncovered(self.passes), self.step)

    @cached_property
    def in_backward(self) -> tuple[MemoryPoint, ...]:
        """Moments at which some blocks have run backward and others have not."""
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
    """Fields of a cost that decide the bytes on a device without offloading."""

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
    fp8_sent: Fp8Weights
    keeps_gathered: bool
    whole_grads: bool
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
    expert_ranks: float
    stages: int
    recompute: float
    recompute_keeps: RecomputePolicy
    whole_outside: bool
    own_tokens: bool
    gathers_logits: bool
    scale: float  # bytes of a micro-batch's activations on one device over those traced, outside tensor splits
    whole_scale: float  # the same with all tokens of a sequence


_terms = attrgetter(*Terms._fields[:-2])


class _Copy(NamedTuple):
    """One copy of a segment on a device: elements, then bytes of a micro-batch."""

    stored_bytes: float  # of the shard that is kept
    cast: float  # elements that are cast for use
    gathered_bytes: float  # of all parameters, full, if shards of them are kept
    trained: float  # elements that get gradients
    stored_grads: float
    stored_state: float
    kept: float  # activations saved for backward
    again: float  # activations that are recomputed instead of kept
    results: float  # of matmuls: their gradients are needed for the weights' gradients
    working: float  # needed by backward in addition
    weights: float  # elements of the weights of different shapes


def micro_batch_share(cost: Cost) -> float:
    """A device's micro-batch as a share of the traced batch."""
    return cost.batch_size / cost.num_micro_batches / cost.traced_batch


def timelines_of(cost: Cost, stages: Iterable[StageCost]) -> list[StageMemory]:
    """Live bytes on each of some stages during a step."""
    whole = micro_batch_share(cost) * cost.activation_scale
    scale = whole / (cost.sequence * cost.context)
    terms = Terms._make((*_terms(cost), scale, whole))
    # Gradients that are freed between steps appear one by one in the first backward. If a micro-batch finished its
    # backward before the stage is full, all gradients exist at the peak.
    least = math.inf if cost.grads_persist else cost.num_micro_batches
    piece = 1.0 / cost.interleave
    return [_timeline(terms, stage, stage.in_flight >= least, piece) for stage in stages]


@lru_cache(maxsize=REMEMBERED)
def _timeline(terms: Terms, stage: StageCost, appear: bool, piece: float) -> StageMemory:
    copies = [(segment.is_block, number, _copy(terms, segment)) for segment, number in stage.parts]
    params = state = trained = 0.0
    for _, number, copy in copies:
        params += number * copy.stored_bytes
        state += number * copy.stored_state
        trained += number * copy.trained
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
        max_transient=max(moment.total - moment.gradients for moment in moments),
        in_flight=stage.in_flight,
    )


def _uncovered(moments: Sequence[MemoryPoint]) -> Iterator[MemoryPoint]:
    """Moments that no other moment dominates in every category: only these can be the peak under any offloading."""
    for index, moment in enumerate(moments):
        covering = (
            other.gradients >= moment.gradients
            and other.activations >= moment.activations
            and other.activations - other.in_blocks >= moment.activations - moment.in_blocks
            and other.transient >= moment.transient
            and other.working >= moment.working
            and (place < index or other != moment)  # of equal moments keep the first
            for place, other in enumerate(moments)
            if place != index
        )
        if not any(covering):
            yield moment


def _moments(
    terms: Terms, parts: list[tuple[bool, float, _Copy]], stage: StageCost, appear: bool, piece: float
) -> Iterator[MemoryPoint]:
    """Moments of the loss, the blocks' backwards and the optimizer's step.

    If no forward comes between, one micro-batch less is in flight in the second backward; in an interleaved schedule,
    one piece of it less. All gradients exist then. Micro-batches whose weights' gradients are deferred hold the
    gradients of matmuls' results. With recomputation the recomputed activations of all micro-batches in flight, and
    one more, are live: simulated with 4 stages, within 11 %.
    """
    in_flight, waiting = stage.in_flight, stage.waiting
    grads = cast = kept = in_blocks = state = outside = weights = held = 0.0
    for is_block, number, copy in parts:
        grads += number * copy.stored_grads
        cast += number * copy.cast
        kept += number * copy.kept
        state += number * copy.stored_state
        held += number * (waiting * copy.results + ((in_flight + 1.0) * copy.again if waiting else 0.0))
        if is_block:
            weights = max(weights, copy.weights)
            in_blocks += number * copy.kept
        else:
            outside = max(outside, copy.working)
    all_grads = terms.grad_itemsize * grads
    casts = 1.0 + max(0.0, in_flight - 1.0) * (1.0 - terms.recompute)  # autocast's, kept for backward
    always = casts * terms.cast_itemsize * cast + terms.placeholder_itemsize * weights
    around, within = _gathered(terms, parts)
    alive, saved = in_flight * kept + held, in_flight * in_blocks
    yield MemoryPoint(0.0 if appear else all_grads, alive, always + around, outside, saved)
    in_pipeline = in_flight > 1
    first, first_in_blocks = piece * kept, piece * in_blocks
    if in_pipeline:
        yield MemoryPoint(all_grads, alive - first, always + around, outside, saved - first_in_blocks)
    done = fresh = 0.0  # elements of the gradients that this backward has computed: as stored, and as computed
    for is_block, number, copy in reversed(parts):
        if is_block:
            for turn in (1.0, number):
                made = terms.grad_itemsize * (done + turn * copy.stored_grads) if appear else all_grads
                new = terms.fresh_itemsize * (fresh + turn * copy.trained)
                gone = (turn - 1.0) * copy.kept
                yield MemoryPoint(made, alive - gone, always + within + new, copy.working, saved - gone)
                if in_pipeline:
                    left = max(0.0, alive - first - gone), max(0.0, saved - first_in_blocks - gone)
                    yield MemoryPoint(all_grads, left[0], always + within + new, copy.working, left[1])
            saved = max(0.0, saved - number * copy.kept)
        alive = max(0.0, alive - number * copy.kept)  # the sums are rounded differently
        done += number * copy.stored_grads
        fresh += number * copy.trained
        if not is_block:
            made = terms.grad_itemsize * done if appear else all_grads
            new = terms.fresh_itemsize * fresh + terms.placeholder_itemsize * copy.weights
            yield MemoryPoint(made, alive, always + around + new, copy.working, saved)
            if in_pipeline:
                left = max(0.0, alive - first), max(0.0, saved - first_in_blocks)
                yield MemoryPoint(all_grads, left[0], always + around + new, copy.working, left[1])
    stepped = terms.grad_itemsize * state if terms.whole_grads else all_grads  # whole ones are shards by then
    yield MemoryPoint(stepped, 0.0, terms.step_itemsize * state, 0.0)


def _gathered(terms: Terms, parts: list[tuple[bool, float, _Copy]]) -> tuple[float, float]:
    """Gathered bytes of sharded parameters, outside of blocks and inside.

    Inside, one block computes while the next is gathered, and the full gradients of two blocks wait for reduction.
    """
    if not terms.gathered_itemsize:
        return 0.0, 0.0
    block = max((copy.gathered_bytes for is_block, _, copy in parts if is_block), default=0.0)
    trained = max((copy.trained for is_block, _, copy in parts if is_block), default=0.0)
    outside = sum(number * copy.gathered_bytes for is_block, number, copy in parts if not is_block)
    inside = sum(number * copy.gathered_bytes for is_block, number, copy in parts if is_block)
    in_blocks = sum(number * copy.trained for is_block, number, copy in parts if is_block)
    gradients = terms.gathered_itemsize * min(2.0 * trained, in_blocks)
    if terms.keeps_gathered:
        return outside + inside, outside + inside + gradients
    return outside, outside + min(2.0 * block, inside) + gradients


def has_all_tokens(cost: Cost | Terms, segment: Segment) -> bool:
    """True if every sequence and context rank has all tokens of a segment, which is possible outside of blocks."""
    is_whole = not cost.own_tokens or segment.needs_all_tokens
    return cost.whole_outside and not segment.is_block and is_whole


def is_gathered(cost: Cost | Terms, segment: Segment) -> bool:
    """True if a head's results are gathered from the tensor ranks, as for a loss that is not a cross entropy."""
    return cost.whole_outside and not segment.is_block and (cost.gathers_logits or not segment.num_losses)


@lru_cache(maxsize=REMEMBERED)
def _copy(terms: Terms, segment: Segment) -> _Copy:
    """Elements and bytes of one copy of a segment on a device.

    Experts are spread over ranks that see different samples, which leaves fewer of those ranks to shard them further. A
    head tied to the embedding holds a second copy if the embedding is on another stage.
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
        load = busiest_load(segment, scale / terms.tensor, ranks=terms.expert, capacity=capacity, skew=skew)
        kept = max(0.0, kept + (load - 1.0) * inside * expert_saved_bytes(segment))
    working = segment.working_bytes * (inside if segment.split_working else scale)
    # An input after its gather, and a gradient before its scatter.
    working += 2.0 * segment.input_bytes * (scale - outside)
    again = 0.0
    if segment.is_block and terms.recompute:
        again = kept - _kept_when_recomputed(terms, segment, inside, outside)
        kept, working = kept - terms.recompute * again, working + max(0.0, again)
        again = terms.recompute * max(0.0, again)
    whole = dense + experts
    results = inside * segment.inside.selective_bytes + outside * segment.outside.selective_bytes
    return _Copy(
        stored_bytes=kept_elements(dense, experts, terms.param_shards, terms.expert_ranks)
        * segment.mean_itemsize(terms.param_itemsize),
        cast=share * whole if 0.0 < segment.frozen_itemsize <= terms.cast_itemsize else whole,
        gathered_bytes=whole * segment.sent_itemsize(terms.gathered_itemsize, terms.fp8_sent),
        trained=share * whole,
        stored_grads=share * kept_elements(dense, experts, terms.grad_shards, terms.expert_ranks),
        stored_state=share * kept_elements(dense, experts, terms.optim_shards, terms.expert_ranks),
        kept=kept,
        again=again,
        results=results,
        working=working + _dequantized_bytes(terms, segment) + segment.early_gradient_bytes,
        weights=_weights(terms, segment) if terms.placeholder_itemsize else 0.0,
    )


def _weights(terms: Terms, segment: Segment) -> float:
    trained = (product for product in segment.matmuls if product.trainable)
    return sum({(product.inner, product.columns): _weight(terms, product) for product in trained}.values())


def _dequantized_bytes(terms: Terms, segment: Segment) -> float:
    """Bytes of the largest quantized weight, dequantized to 16 bits."""
    return max((2.0 * _weight(terms, product) for product in segment.matmuls if product.stored_itemsize), default=0.0)


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
    """The number of matmuls whose results are added to the residual stream, so plain backward need not save them."""
    return sum(product.count for product in segment.matmuls if product.split == "rows" and not product.of_experts)
