"""What arithmetic promises of a pipeline is what each stage does when it is simulated.

As `test_cost_against_simulation`, stage by stage: messages to neighbours must be as many, their bytes and the peak
within 10 %, parameters, masters and optimizer states within 1 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from atorch.auto.opt_lib.completion import complete
from atorch.auto.planner.simulate import simulate
from atorch.auto.planner.stages import ranks_of_stages
from atorch.auto.strategy import Strategy
from atorch.cost import plain_cost
from atorch.cost.communication import boundary_bytes
from atorch.cost.memory import stage_memory
from atorch.cost.stages import stages_of
from tests.contract.test_cost_against_simulation import ROWS, STATES, batch, gpt2, job, llama

STAGES, LAYERS, MICRO_BATCHES = 4, 8, 8


def strategy_of(beside: tuple[Any, ...], data: int, **knobs: Any) -> Strategy:
    axes = [("pipeline", STAGES), ("data", data)]
    pipeline = ("pipeline_parallel", {"micro_batches": MICRO_BATCHES, **knobs})
    return complete(Strategy.of([("parallel_mode", (axes, None)), pipeline, *beside]), STAGES * data)


@pytest.mark.parametrize(
    ("make", "beside", "data"),
    [
        pytest.param(llama, (), 1, id="llama"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                (gpt2, (), 1),
                (llama, ("checkpoint",), 1),
                (llama, (("half", "bf16"),), 1),
                (llama, ("ddp",), 2),
                (llama, ("fsdp",), 2),
            )
        ),
    ],
)
def test_what_a_stage_costs_is_what_it_does(
    make: Callable[[int], nn.Module], beside: tuple[Any, ...], data: int
) -> None:
    ctx, profile = job(make, LAYERS)
    strategy = strategy_of(beside, data, split_points=[f"{blocks_of(make)}.{at}" for at in (2, 4, 6)])
    samples = 2 * ROWS * data
    cost = strategy.cost(plain_cost(profile, samples))
    for place, rank in ranks_of_stages(strategy, STAGES * data).items():
        happened = simulate(ctx, strategy, batch(), world_size=STAGES * data, global_batch=samples, rank=rank)
        neighbours = (place > 0) + (place + 1 < STAGES)
        for kind in ("send", "receive"):
            calls, size = happened.collectives[kind, ("pipeline",)]
            assert calls == neighbours * MICRO_BATCHES
            assert size == pytest.approx(calls * boundary_bytes(cost), rel=0.1)
        memory = stage_memory(cost, stages_of(cost)[place])
        for state in STATES:
            assert getattr(memory, state) == pytest.approx(happened.memory.get(state, 0.0), rel=0.01, abs=4096), state
        assert memory.total == pytest.approx(happened.peak_bytes, rel=0.1)


def blocks_of(make: Callable[[int], nn.Module]) -> str:
    return "model.layers" if make is llama else "transformer.h"
