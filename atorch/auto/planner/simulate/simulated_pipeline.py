"""Pipelines in simulation: representative stages, and few micro-batches that are extrapolated to many.

A stage is simulated with all its blocks. First, middle and last stages differ: the ends hold modules before or after
the blocks, and send to one neighbour instead of two. Under 1F1B, a pipeline of p stages alternates between forward and
backward after at most p micro-batches; every further one repeats the last (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2). Two more micro-batches show the messages of each, and memory does not grow any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
from atorch.auto.opt_lib.shared.defaults import batch_place
from atorch.auto.strategy import Method, Strategy
from atorch.distributed.mesh import groups_along

TAKING_TURNS = 2  # micro-batches beyond those that fill the pipeline


@dataclass(frozen=True)
class Fewer:
    """A strategy for a step of fewer micro-batches of the same size."""

    strategy: Strategy
    samples: int
    left_out: int
    """Micro-batches that are not simulated."""


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


def with_fewer_micro_batches(strategy: Strategy, samples: int) -> Fewer:
    """The fewest micro-batches of a complete strategy with a pipeline from which a step of `samples` follows."""
    from atorch.auto.opt_lib.pipeline_parallel.stages import Batches

    pipeline, stages = strategy.get(PipelineParallel), num_stages(strategy)
    assert pipeline is not None, "a strategy with a pipeline"
    micro_batch: Any = next((method for method in strategy if method.name == "micro_batch"), None)
    count = Batches(pipeline, micro_batch, stages).count(samples // batch_place(strategy, "cpu")[1])
    few = stages + TAKING_TURNS
    if pipeline.schedule != "1f1b" or count <= few:
        return Fewer(strategy, samples, 0)
    methods = tuple(_in_parts(method, few) for method in strategy)
    return Fewer(Strategy(methods, strategy.metadata), samples // count * few, count - few)


def _in_parts(method: Method, count: int) -> Method:
    knob = {"pipeline_parallel": "micro_batches", "micro_batch": "count"}.get(method.name)
    if knob is None or (method.name == "micro_batch" and getattr(method, knob) is None):
        return method
    return method.model_copy(update={knob: count})
