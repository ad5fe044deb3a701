"""Peak bytes of a step, by category, on the device of the pipeline stage that needs the most."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from atorch.cost.profile import Region, Segment
from atorch.cost.stages import Stage, stages_of
from atorch.cost.state import Cost


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
    on_host: float = 0.0  # beside them, in host memory

    @property
    def total(self) -> float:
        """All categories together, on the device."""
        kept = self.parameters + self.gradients + self.optimizer + self.masters + self.buffers
        return kept + self.activations + self.transient + self.working

    def by_category(self) -> dict[str, float]:
        """Category → bytes, the largest first, without those that hold nothing."""
        held = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("stage", "on_host")}
        return {name: value for name, value in sorted(held.items(), key=lambda item: -item[1]) if value > 0}


def peak_memory(cost: Cost) -> Memory:
    """The bytes at a step's peak, on the stage that needs the most."""
    return max((stage_memory(cost, stage) for stage in stages_of(cost)), key=lambda memory: memory.total)


def stage_memory(cost: Cost, stage: Stage) -> Memory:
    """What is kept all the time, the activations, and what backward needs beside them, on a device of one stage.

    The sum is an upper bound of the peaks at the end of forward (no gradients yet, after `zero_grad`) and at the end of
    backward (no activations any more); Rajbhandari et al. 2020, arXiv 1910.02054, sections 3.1 and 3.2.
    """
    params = sum(copies * (cost.local_params(each) + _tied(cost, each, stage)) for each, copies in stage.parts)
    trainable = sum(copies * (cost.local_trainable(each) + _tied(cost, each, stage)) for each, copies in stage.parts)
    whole = Memory(
        stage=stage.index,
        parameters=params * cost.param_itemsize / cost.param_shards,
        gradients=trainable * cost.grad_itemsize / cost.grad_shards,
        optimizer=trainable * cost.optim_itemsize / cost.optim_shards,
        masters=trainable * cost.master_itemsize / cost.optim_shards,
        activations=stage.in_flight * sum(copies * _kept(cost, each) for each, copies in stage.parts),
        buffers=cost.buffer_bytes,
        transient=params * cost.cast_itemsize + _gathered(cost, stage) + cost.bucket_bytes,
        working=max((_working(cost, each) for each, _ in stage.parts), default=0.0),
    )
    return _with_host(cost, whole)


def host_bytes(cost: Cost) -> float:
    """What waits in host memory for one device, on the stage that has the most there."""
    return max(stage_memory(cost, stage).on_host for stage in stages_of(cost))


def _with_host(cost: Cost, whole: Memory) -> Memory:
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
    return replace(
        whole,
        parameters=whole.parameters * state_share,
        gradients=whole.gradients * state_share,
        optimizer=whole.optimizer * step_share,
        masters=whole.masters * step_share,
        activations=whole.activations - saved,
        on_host=waiting + stepped + saved,
    )


def peak_bytes(cost: Cost) -> float:
    """The sum of `peak_memory`."""
    return peak_memory(cost).total


def micro_batch_share(cost: Cost) -> float:
    """What a micro-batch of one device is of the traced batch."""
    return cost.batch_size / cost.num_micro_batches / cost.traced_batch


def _scale(cost: Cost) -> float:
    """Bytes of a micro-batch's activations on one device against the traced ones, outside of tensor splits."""
    return micro_batch_share(cost) * cost.activation_scale / (cost.sequence * cost.context)


def _tied(cost: Cost, segment: Segment, stage: Stage) -> float:
    """A head that is the embedding is held once more where the embedding is on another stage."""
    return segment.tied_params / cost.tensor if cost.stages > 1 and stage.index > 0 else 0.0


def _region_bytes(cost: Cost, inside: float, outside: float) -> float:
    norms = cost.tensor if cost.splits_norms else 1
    return _scale(cost) * (inside / cost.tensor + outside / norms)


def _saved(cost: Cost, segment: Segment) -> float:
    return _region_bytes(cost, segment.inside.saved_bytes, segment.outside.saved_bytes)


def _kept_when_recomputed(cost: Cost, segment: Segment) -> float:
    inside: Region = segment.inside
    if cost.recompute_keeps == "nothing":
        return 0.0
    if cost.recompute_keeps == "selective":
        return _region_bytes(cost, inside.selective_bytes, segment.outside.selective_bytes)
    return _region_bytes(cost, 0.0, segment.input_bytes)


def _kept(cost: Cost, segment: Segment) -> float:
    """Activations of one copy that wait for backward."""
    saved = _saved(cost, segment)
    if not segment.is_block or not cost.recompute:
        return saved
    return saved + cost.recompute * (_kept_when_recomputed(cost, segment) - saved)


def _working(cost: Cost, segment: Segment) -> float:
    """What forward or backward of one copy needs beside what is saved: the largest gradient, a block run again."""
    working = _scale(cost) * segment.working_bytes / (cost.tensor if segment.split_working else 1)
    if segment.is_block and cost.recompute:
        working += _saved(cost, segment)
    return working


def _gathered(cost: Cost, stage: Stage) -> float:
    """Sharded parameters that are whole at one moment: all that are kept, else two blocks and what is outside of them.

    One block computes while the next is gathered, and the gradients of a block are whole until they are reduced.
    """
    if not cost.gathered_itemsize:
        return 0.0
    block = max((cost.local_params(each) for each, _ in stage.parts if each.is_block), default=0.0)
    outside = sum(copies * cost.local_params(each) for each, copies in stage.parts if not each.is_block)
    inside = sum(copies * cost.local_params(each) for each, copies in stage.parts if each.is_block)
    whole = inside + outside if cost.keeps_gathered else outside + min(2 * block, inside)
    return cost.gathered_itemsize * (whole + min(2 * block, inside))
