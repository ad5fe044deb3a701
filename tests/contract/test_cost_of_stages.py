"""What arithmetic promises of a pipeline is what each stage does when it is simulated.

As `test_cost_against_simulation`, stage by stage: messages to neighbours must be as many, their bytes and the peak
within 10 %, parameters, masters and optimizer states within 1 %.
"""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.simulate.simulated_pipeline import ranks_of_stages
from atorch.auto.planner.simulate.simulation import simulate
from atorch.auto.strategy import Strategy
from atorch.cost import plain_cost
from atorch.cost.comm.communication import boundary_bytes
from atorch.cost.memory import stage_memory
from atorch.cost.pipeline_stages import stages_of
from tests.contract.test_cost_against_simulation import ROWS, STATES, batch, job, llama

STAGES, LAYERS, MICRO_BATCHES = 4, 8, 8


def strategy_of(beside: tuple[Any, ...], data: int, **knobs: Any) -> Strategy:
    axes = [("pipeline", STAGES), ("data", data)]
    pipeline = ("pipeline_parallel", {"micro_batches": MICRO_BATCHES, **knobs})
    return complete(Strategy.of([("parallel_mode", (axes, None)), pipeline, *beside]), STAGES * data)


@pytest.mark.parametrize(
    ("beside", "data"),
    [
        pytest.param((), 1, marks=pytest.mark.nightly, id="alone"),
        pytest.param((("half", "bf16"),), 1, marks=pytest.mark.nightly, id="half"),
        pytest.param(("ddp",), 2, marks=pytest.mark.nightly, id="ddp"),
    ],
)
def test_what_a_stage_costs_is_what_it_does(beside: tuple[Any, ...], data: int) -> None:
    ctx, profile = job(llama, LAYERS)
    strategy = strategy_of(beside, data, split_points=[f"model.layers.{at}" for at in (2, 4, 6)])
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
