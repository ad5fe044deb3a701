"""Pipelines in simulation: which stages are looked at, and how much of their steps."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.plan_for_cluster import Subject
from atorch.auto.planner.simulate.metadata_tracing import foreseen
from atorch.auto.planner.simulate.simulated_pipeline import num_stages, ranks_of_stages, with_fewer_micro_batches
from atorch.auto.simulated_candidates import simulated as verified
from atorch.auto.strategy import Strategy
from atorch.profiler.trace import trace
from tests.auto.planner.simulate.test_simulation import batch, job, llama, simulated


def pipeline(stages: int, data: int = 1, beside: tuple[Any, ...] = (), **knobs: Any) -> Strategy:
    axes = [("data", data), ("pipeline", stages)]
    return complete(
        Strategy.of([("parallel_mode", (axes, None)), ("pipeline_parallel", knobs), *beside]), stages * data
    )


def test_first_middle_and_last_stages_stand_for_all() -> None:
    assert ranks_of_stages(pipeline(4, data=2), 8) == {0: 0, 1: 2, 3: 6}
    assert ranks_of_stages(pipeline(2), 2) == {0: 0, 1: 1}
    assert ranks_of_stages(complete(Strategy.of(["fsdp"]), 8), 8) == {0: 0}
    assert num_stages(complete(Strategy.of([("parallel_mode", ([("data", 8)], None)), "pipeline_parallel"]), 8)) == 1


@pytest.mark.parametrize(
    ("strategy", "samples", "left_out", "kept"),
    [
        (pipeline(2, micro_batches=16), 32, 12, 8),
        (pipeline(2, data=2, micro_batches=16), 64, 12, 16),
        (pipeline(2, beside=(("micro_batch", {"size": 2}),)), 32, 12, 8),
        (pipeline(2, beside=(("micro_batch", {"count": 8}),)), 32, 4, 16),
        (pipeline(2, micro_batches=4), 32, 0, 32),
        (pipeline(2, micro_batches=16, schedule="gpipe"), 32, 0, 32),
        (pipeline(2, micro_batches=16, schedule="interleaved"), 32, 0, 32),
    ],
    ids=str,
)
def test_a_full_pipeline_is_looked_at_twice_more(strategy: Strategy, samples: int, left_out: int, kept: int) -> None:
    fewer = with_fewer_micro_batches(strategy, samples)
    assert (fewer.left_out, fewer.samples) == (left_out, kept)
    assert with_fewer_micro_batches(fewer.strategy, fewer.samples).left_out == 0


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_few_micro_batches_tell_what_all_do(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    strategy = pipeline(2, micro_batches=8, split_points=["model.layers.1"])
    told = simulated(job(llama(2)), strategy, world_size=2, rank=rank)
    monkeypatch.setattr("atorch.auto.planner.simulate.simulated_pipeline.TAKING_TURNS", 8)
    happened = simulated(job(llama(2)), strategy, world_size=2, rank=rank)
    assert "4 more micro-batches do as the last that was simulated" in told.notes
    assert told.collectives == happened.collectives
    assert told.peak_bytes == pytest.approx(happened.peak_bytes, rel=0.005)


def test_what_was_learnt_of_few_blocks_is_told_of_all() -> None:
    axes = ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None))
    ctx = job(llama(5))
    found = foreseen(ctx, Strategy.of([axes, "tensor_parallel", "pipeline_parallel"]), batch(), 3, told_of=5)
    (learnt,) = found.metadata.values()
    assert [each for kind in learnt["kinds"] for each in kind["paths"]] == [f"model.layers.{i}" for i in range(5)]


def test_the_fullest_stage_is_what_a_plan_tells() -> None:
    ctx = job(llama(2))
    subject = Subject(trace(ctx.root, batch(), ctx.call_model, ctx.loss_func, ctx.make_optimizer), ctx, batch())
    strategy = pipeline(2, micro_batches=2, split_points=["model.layers.1"])
    (found,) = verified(subject, [(strategy, 1e6)], 2, 8)
    held = {each["stage"]: each["peak_bytes"] for each in found["stages"]}
    assert held.keys() == {0, 1}
    assert found["peak_bytes"] == max(held.values())
    assert found["notes"][0].startswith("on stage 0, the fullest of 0 (")
