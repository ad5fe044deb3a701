"""Pipelines in simulation: ranks that stand for all stages, and few micro-batches that tell of many.

A stage is simulated whole, with its own blocks. First, middle and last stages differ: they hold what comes before or
after the blocks, and send to one neighbour or to two. Under 1F1B a stage of p comes to take turns between forward and
backward within p micro-batches, and then each is as the one before (Narayanan et al. 2021, arXiv 2104.04473, section
2.2): two more show what it sends, and nothing that is held grows any more.
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
    """A strategy for a step of fewer samples, which are cut into micro-batches of the same size."""

    strategy: Strategy
    samples: int
    left_out: int
    """Micro-batches that are not simulated."""


def num_stages(strategy: Strategy) -> int:
    """Processes along the pipeline of a complete strategy, 1 where there is none."""
    mode = strategy.get(ParallelMode)
    return dict(mode.slices).get("pipeline", 1) if mode is not None and strategy.get(PipelineParallel) else 1


def ranks_of_stages(strategy: Strategy, world_size: int) -> dict[int, int]:
    """A rank at the first, at a middle and at the last place of the pipeline of a complete strategy, by the place.

    The second stands for what lies between: of these it holds the most micro-batches.
    """
    mode, stages = strategy.get(ParallelMode), num_stages(strategy)
    if mode is None or stages == 1:
        return {0: 0}
    ranks = groups_along(mode.slices, world_size, mode.rank_order, ("pipeline",))[0]
    return {place: ranks[place] for place in dict.fromkeys((0, min(1, stages - 1), stages - 1))}


def with_fewer_micro_batches(strategy: Strategy, samples: int) -> Fewer:
    """The fewest micro-batches of a complete strategy with a pipeline that tell what a step of `samples` does."""
    from atorch.auto.opt_lib.pipeline_parallel.stages import Batches

    method, stages = strategy.get(PipelineParallel), num_stages(strategy)
    assert method is not None, "a strategy with a pipeline"
    other: Any = next((each for each in strategy if each.name == "micro_batch"), None)
    count = Batches(method, other, stages).count(samples // batch_place(strategy, "cpu")[1])
    few = stages + TAKING_TURNS
    if method.schedule != "1f1b" or count <= few:
        return Fewer(strategy, samples, 0)
    methods = tuple(_in_parts(each, few) for each in strategy)
    return Fewer(Strategy(methods, strategy.metadata), samples // count * few, count - few)


def _in_parts(method: Method, count: int) -> Method:
    """A method that says how many micro-batches there are says so many."""
    knob = {"pipeline_parallel": "micro_batches", "micro_batch": "count"}.get(method.name)
    if knob is None or (method.name == "micro_batch" and getattr(method, knob) is None):
        return method
    return method.model_copy(update={knob: count})
