"""Small jobs to simulate in the place of a large one, and the extrapolation of their figures to its size.

Depth: the live bytes at one moment of a step, such as the gradient's arrival at the second block, are linear in the
number of blocks. The peak is not, because its moment moves with depth. So every moment is extrapolated, and the maximum
is taken afterwards. The first and last block of a run have other neighbours, and prefetching or late freeing reaches
one block further. So two blocks at each end are extrapolated from 3 repeats and 4, the fewest that contain them; the
blocks in between are interpolated.

Pipelines: a stage is simulated with all its blocks. First, middle and last stages differ: the ends hold modules before
or after the blocks, and send to one neighbour instead of two. Under 1F1B, a pipeline of p stages alternates between
forward and backward after at most p micro-batches; every further one repeats the last (Narayanan et al. 2021, arXiv
2104.04473, section 2.2). Two more micro-batches show the messages of each, and memory does not grow any more.

Fake tensors have no values to observe. So methods that watch the model observe a small real copy first, in one process,
and the strategy carries their metadata as a saved one does. The values may be arbitrary, also for a model on the meta
device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from atorch.auto.context import Context
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
from atorch.auto.opt_lib.shared.defaults import batch_place
from atorch.auto.strategy import Phase, Strategy
from atorch.distributed.mesh import groups_along
from atorch.distributed.rng import preserved_rng
from atorch.distributed.world import World
from atorch.model.copy import copy_structure, lazy_copy
from atorch.model.copy_isolation import Originals
from atorch.model.pytree import map_tensors
from atorch.model.structure import block_names, extended_to_all, shorten
from atorch.profiler.memory_tracker import ACTIVATIONS, MemorySample

SHORT, LONG = 3, 4

Sent = Mapping[tuple[str, tuple[str, ...]], tuple[float, float]]  # (kind, axes) → (calls, bytes)


@dataclass(frozen=True)
class Observed:
    """Bytes live and sent in one step."""

    moments: tuple[MemorySample, ...]
    sent: Sent
    sent_each: Sent = field(default_factory=dict)
    """Bytes sent from the start of the last but one forward pass to that of the last."""

    def with_more(self, micro_batches: int) -> Observed:
        """The step with that many more micro-batches, each of which sends as much as was sent between the last starts.

        torch's PipelineStage keeps a receive buffer for every micro-batch from the first step on.
        """
        sent, received = dict(self.sent), 0.0
        for key, (calls, size) in self.sent_each.items():
            calls_before, bytes_before = sent[key]
            sent[key] = calls_before + micro_batches * calls, bytes_before + micro_batches * size
            received += micro_batches * size if key == ("receive", ("pipeline",)) else 0.0
        moments = tuple(
            replace(moment, memory={**moment.memory, ACTIVATIONS: moment.memory.get(ACTIVATIONS, 0.0) + received})
            for moment in self.moments
        )
        return replace(self, moments=moments, sent=sent)


class DepthError(Exception):
    """The moments of two depths do not correspond, so that they cannot be extrapolated."""


def extend(short: Observed, long: Observed, repeats: int) -> Observed:
    """The step of a model of `repeats` blocks, extrapolated from observations with SHORT and with LONG blocks.

    Raises:
        DepthError: the two have different moments, or send different kinds of messages.
    """
    steps = repeats - LONG
    moments: list[MemorySample] = []
    for few, many in zip(*map(_same_runs, (short, long), (long, short)), strict=True):
        if few[0].index is None:
            moments.append(MemorySample(few[0].name, None, _line(few[0].memory, many[0].memory, steps)))
        elif (len(few), len(many)) == (SHORT, LONG):
            moments += _run(few, many, repeats)
        else:
            raise DepthError(f"{few[0].name} has {len(few)} moments in {SHORT} blocks and {len(many)} in {LONG}")
    if short.sent.keys() != long.sent.keys():
        raise DepthError(f"messages are {sorted(short.sent)} in {SHORT} blocks and {sorted(long.sent)} in {LONG}")
    sent = {
        key: (calls + (calls - short.sent[key][0]) * steps, size + (size - short.sent[key][1]) * steps)
        for key, (calls, size) in long.sent.items()
    }
    return Observed(tuple(moments), sent)


def _same_runs(seen: Observed, other: Observed) -> list[list[MemorySample]]:
    """Runs of consecutive moments with one name over the blocks; a moment outside of blocks is a run of its own."""
    runs, others = _runs(seen), _runs(other)
    if [run[0].name for run in runs] != [run[0].name for run in others]:
        raise DepthError(f"a step goes through {len(runs)} kinds of moments at one depth and {len(others)} at another")
    return runs


def _runs(seen: Observed) -> list[list[MemorySample]]:
    keyed = itertools.groupby(
        enumerate(seen.moments), lambda pair: (pair[1].name, None if pair[1].index is not None else pair[0])
    )
    return [[moment for _, moment in group] for _, group in keyed]


def _run(few: Sequence[MemorySample], many: Sequence[MemorySample], repeats: int) -> list[MemorySample]:
    """The moments of all blocks, in the order of the step."""
    ends = {place: _line(few[place].memory, many[place].memory, repeats - LONG) for place in (0, 1, -2, -1)}
    between = (_line(ends[1], ends[-2], (place - 1) / (repeats - 3) - 1) for place in range(2, repeats - 2))
    memories = [ends[0], ends[1], *between, ends[-2], ends[-1]]
    indices = range(repeats) if few[0].index == 0 else range(repeats - 1, -1, -1)
    return [MemorySample(few[0].name, index, memory) for index, memory in zip(indices, memories, strict=True)]


def _line(one: Mapping[str, float], two: Mapping[str, float], steps: float) -> dict[str, float]:
    """`two + steps * (two - one)`, by category."""
    return {
        name: two.get(name, 0.0) + (two.get(name, 0.0) - one.get(name, 0.0)) * steps
        for name in dict.fromkeys((*one, *two))
    }


TAKING_TURNS = 2  # micro-batches beyond those that fill the pipeline


def num_stages(strategy: Strategy) -> int:
    """Processes along the pipeline of a complete strategy; 1 without a pipeline."""
    mode = strategy.get(ParallelMode)
    return dict(mode.slices).get("pipeline", 1) if mode is not None and strategy.get(PipelineParallel) else 1


def ranks_of_stages(strategy: Strategy, world_size: int) -> dict[int, int]:
    """Stage → a rank of it, for the first, second and last stage of a complete strategy's pipeline.

    The second represents the middle stages, of which it holds the most micro-batches.
    """
    mode, stages = strategy.get(ParallelMode), num_stages(strategy)
    if mode is None or stages == 1:
        return {0: 0}
    ranks = groups_along(mode.slices, world_size, mode.rank_order, ("pipeline",))[0]
    return {place: ranks[place] for place in dict.fromkeys((0, min(1, stages - 1), stages - 1))}


def with_fewer_micro_batches(strategy: Strategy, samples: int) -> tuple[Strategy, int, int]:
    """The fewest micro-batches of a complete strategy with a pipeline from which a step of `samples` follows.

    Returns the strategy for them, their samples, and the number of micro-batches that are left out.
    """
    from atorch.auto.opt_lib.pipeline_parallel.stages import Batches

    pipeline, stages = strategy.get(PipelineParallel), num_stages(strategy)
    assert pipeline is not None, "a strategy with a pipeline"
    count = Batches(pipeline, strategy, stages).count(samples // batch_place(strategy, "cpu")[1])
    few = stages + TAKING_TURNS
    if pipeline.schedule != "1f1b" or count <= few:
        return strategy, samples, 0
    methods = tuple(method.in_parts(few) for method in strategy)
    return Strategy(methods, strategy.metadata), samples // count * few, count - few


_HERE = torch.device("cpu")


def with_metadata(
    ctx: Context, strategy: Strategy, batch: Any, repeats: int | None, extended_to: int | None = None
) -> Strategy:
    """`strategy` with the metadata that its methods learn on `batch` from the model, cut to `repeats` blocks.

    extended_to: the number of blocks that the metadata is extended to, if that is not `repeats`.
    """
    mode = strategy.get(ParallelMode)
    if mode is None or not any(method.needs_sample for method in strategy):
        return strategy
    copied = copy_structure(ctx.root, lambda tensor: tensor)
    if repeats is not None:
        shorten(copied, repeats)
    copied = lazy_copy(copied, _HERE)
    world = World(rank=0, size=1, local_rank=0, device=_HERE)
    job = replace(ctx, root=copied, parts=(copied,), world=world, mesh=None, make_loader=None, strategy=strategy)
    job = replace(job, sample_batch=map_tensors(_with_values, batch))
    learnt: dict[str, Any] = {}
    with preserved_rng(), Originals(ctx.root):
        for method in strategy:
            if method.needs_sample:
                learnt.update(method.trace_metadata(job, dict(mode.slices)))
            elif Phase.MESH < method.phase < Phase.TENSOR:
                job = method.apply(job)
    if repeats is not None and extended_to is not None:
        learnt = extended_to_all(learnt, block_names(ctx.root, repeats), block_names(ctx.root, extended_to))
    return replace(strategy, metadata={**strategy.metadata, **learnt})


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one of its shape with values: noise, or ones, which are valid indices of any table."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype)
