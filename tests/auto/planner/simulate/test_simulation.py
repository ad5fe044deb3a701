"""Simulation: depths carried further, worlds of any size in one process, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from atorch.auto.context import Context
from atorch.auto.job import make_context
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.plan_for_cluster import Subject
from atorch.auto.planner.simulate.simulation import Simulated, simulate
from atorch.auto.planner.simulate.small_simulation import (
    num_stages,
    ranks_of_stages,
    with_fewer_micro_batches,
    with_metadata,
)
from atorch.auto.simulated_candidates import simulated as verified
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import World
from atorch.errors import ArgumentError, CapabilityError
from atorch.profiler.trace import trace
from tests import language_models


def pipeline(stages: int, data: int = 1, beside: tuple[Any, ...] = (), **knobs: Any) -> Strategy:
    axes = [("data", data), ("pipeline", stages)]
    return complete(
        Strategy.of([("parallel_mode", (axes, None)), ("pipeline_parallel", knobs), *beside]), stages * data
    )


def test_stages_of_a_pipeline_stand_for_all() -> None:
    assert ranks_of_stages(pipeline(4, data=2), 8) == {0: 0, 1: 2, 3: 6}
    assert ranks_of_stages(pipeline(2), 2) == {0: 0, 1: 1}
    assert ranks_of_stages(complete(Strategy.of(["fsdp"]), 8), 8) == {0: 0}
    assert num_stages(complete(Strategy.of([("parallel_mode", ([("data", 8)], None)), "pipeline_parallel"]), 8)) == 1

    axes = ("parallel_mode", ([("tensor", 2), ("pipeline", 2)], None))
    ctx = job(llama(5))
    found = with_metadata(ctx, Strategy.of([axes, "tensor_parallel", "pipeline_parallel"]), batch(), 3, extended_to=5)
    (learnt,) = found.metadata.values()
    assert [each for kind in learnt["kinds"] for each in kind["paths"]] == [f"model.layers.{i}" for i in range(5)]


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
    few, *found = with_fewer_micro_batches(strategy, samples)
    assert found == [kept, left_out]
    assert with_fewer_micro_batches(few, kept) == (few, kept, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_few_micro_batches_tell_what_all_do(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    strategy = pipeline(2, micro_batches=8, split_points=["model.layers.1"])
    told = simulated(job(llama(2)), strategy, world_size=2, rank=rank)
    monkeypatch.setattr("atorch.auto.planner.simulate.small_simulation.TAKING_TURNS", 8)
    happened = simulated(job(llama(2)), strategy, world_size=2, rank=rank)
    assert "4 more micro-batches do as the last that was simulated" in told.notes
    assert told.collectives == happened.collectives
    assert told.peak_bytes == pytest.approx(happened.peak_bytes, rel=0.005)


@pytest.mark.slow
def test_the_fullest_stage_is_what_a_plan_tells() -> None:
    ctx = job(llama(2))
    subject = Subject(trace(ctx.root, batch(), ctx.call_model, ctx.loss_func, ctx.make_optimizer), ctx, batch())
    strategy = pipeline(2, micro_batches=2, split_points=["model.layers.1"])
    (found,) = verified(subject, [(strategy, 1e6)], 2, 8)
    held = {each["stage"]: each["peak_bytes"] for each in found["stages"]}
    assert held.keys() == {0, 1}
    assert found["peak_bytes"] == max(held.values())
    assert found["notes"][0].startswith("on stage 0, the fullest of 0 (")


VOCAB, SEQ, ROWS = 64, 16, 8
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def llama(layers: int) -> nn.Module:
    return language_models.llama(VOCAB, layers=layers)


def gpt2(layers: int) -> nn.Module:
    return language_models.gpt2(VOCAB, layers=layers, positions=SEQ, loss_type="none")


def t5(layers: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def cross_entropy(batch: Any, output: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output["logits"].float().reshape(-1, VOCAB), batch["labels"].reshape(-1))


def job(model: nn.Module, **more: Any) -> Context:
    arguments: dict[str, Any] = {
        "optim_func": torch.optim.AdamW,
        "loss_func": cross_entropy,
        "model_input_format": "unpack_dict",
        **more,
    }
    return make_context(model, **arguments, world=ALONE, cluster=ClusterSpec.detect(ALONE, measure=False))


def llama_job() -> Context:
    with torch.device("meta"):
        model = llama(1)
    return job(model)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(ROWS * SEQ).reshape(ROWS, SEQ) % VOCAB
    return {"input_ids": tokens, "labels": tokens.clone()}


def simulated(ctx: Context, strategy: Any, world_size: int = 8, **more: Any) -> Simulated:
    return simulate(ctx, Strategy.of(strategy), batch(), world_size=world_size, **more)


HYBRID = [("parallel_mode", ([("zero", 4), ("data", 2)], None)), ("fsdp", {"sharding_strategy": "HYBRID_SHARD"})]
CASES: dict[str, tuple[Callable[[int], nn.Module], Any]] = {
    "fsdp": (llama, ["fsdp"]),
    "half": (gpt2, ["fsdp", ("half", "bf16"), "checkpoint"]),
    "hybrid": (llama, [*HYBRID, ("amp_native", "bf16")]),
    "micro_batch": (llama, ["zero2", ("micro_batch", {"count": 2})]),
}


SAMPLE = ("fsdp",)
"""`make test-all` runs these, `make test-nightly` every case."""


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name in SAMPLE else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
def test_few_blocks_tell_what_all_do(monkeypatch: pytest.MonkeyPatch, make: Any, strategy: Any) -> None:
    """Five blocks, carried there from few and simulated whole: every moment, byte and message."""
    carried = simulated(job(make(5)), strategy, global_batch=32)
    monkeypatch.setattr("atorch.auto.planner.simulate.simulation.num_repeats", lambda model: None)
    whole = simulated(job(make(5)), strategy, global_batch=32)
    assert carried.notes[-1] == "5 equal blocks were simulated as 3 and as 4"
    assert carried.collectives == whole.collectives
    assert [(m.name, m.index) for m in carried.moments] == [(m.name, m.index) for m in whole.moments]
    for mine, theirs in zip(carried.moments, whole.moments, strict=True):
        assert mine.total_bytes == pytest.approx(theirs.total_bytes, rel=1e-3), (mine.name, mine.index)
    assert carried.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)


@pytest.fixture(scope="module")
def sharded() -> Simulated:
    return simulated(job(llama(1)), ["fsdp"])


def test_a_simulation_leaves_the_model_alone_and_becomes_plain_data(sharded: Simulated) -> None:
    ctx = llama_job()
    before = dict(ctx.root.named_parameters())
    on_meta = simulated(ctx, ["fsdp"])
    assert dict(ctx.root.named_parameters()) == before
    assert not hasattr(ctx.root, "_atorch")
    assert not dist.is_initialized()
    assert on_meta == sharded

    data = sharded.to_json_data()
    assert data["peak_bytes"] == max(sum(moment["memory"].values()) for moment in data["moments"])
    assert {each["kind"] for each in data["collectives"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(each["axes"] == ["data"] for each in data["collectives"])


@pytest.mark.nightly
def test_different_kinds_of_blocks_are_simulated_whole() -> None:
    tokens = batch()["input_ids"]
    given = {"input_ids": tokens, "labels": tokens.clone()}
    seen = simulate(job(t5(5)), Strategy.of(["ddp"]), given, world_size=4)
    assert seen.notes == ("all blocks were simulated: the model has no single list of blocks that are all alike",)
    assert seen.peak_bytes > 0


@pytest.mark.slow
def test_what_shares_out_the_whole_model_is_simulated_whole() -> None:
    assert "ddp shares out the whole model" in simulated(job(llama(5)), ["ddp"]).notes[-1]


def test_what_cannot_be_simulated_is_said() -> None:
    assert simulated(job(llama(1)), ["compile"], 1).notes[0].startswith("compile is left out")

    with pytest.raises(ArgumentError, match="optim_func and loss_func"):
        simulated(job(llama(2), optim_func=None, loss_func=None), ["fsdp"])


@pytest.mark.nightly
def test_a_real_group_is_not_disturbed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CapabilityError, match=r"has a group of 1; simulate in a process of its own"):
            simulated(llama_job(), ["fsdp"], 4)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
