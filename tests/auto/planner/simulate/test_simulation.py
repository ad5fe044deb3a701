"""Simulation: depths carried further, worlds of any size in one process, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from atorch.auto.context import Context
from atorch.auto.job import make_context
from atorch.auto.planner.simulate.simulation import Simulated, simulate
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.distributed.world import World
from atorch.errors import ArgumentError, CapabilityError

VOCAB, SEQ, ROWS = 64, 16, 8
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(layers: int) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=SEQ, n_embd=32, n_layer=layers, n_head=4, use_cache=False, loss_type="none"
        )
    )


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
"""`make test` runs these, `make test-nightly` every case."""


@pytest.mark.parametrize(
    ("make", "strategy"),
    [pytest.param(*case, id=name, marks=[] if name in SAMPLE else pytest.mark.nightly) for name, case in CASES.items()],
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


def test_the_model_is_left_alone_and_may_be_on_meta(sharded: Simulated) -> None:
    ctx = llama_job()
    before = dict(ctx.root.named_parameters())
    on_meta = simulated(ctx, ["fsdp"])
    assert dict(ctx.root.named_parameters()) == before
    assert not hasattr(ctx.root, "_atorch")
    assert not dist.is_initialized()
    assert on_meta == sharded


@pytest.mark.nightly
def test_shards_shrink_with_the_world() -> None:
    ctx = job(llama(2))
    few, many = (simulated(ctx, ["fsdp"], size, global_batch=size).moments[-1].memory for size in (2, 16))
    assert few["parameters"] == pytest.approx(8 * many["parameters"], rel=0.2)
    assert few["optimizer"] == pytest.approx(8 * many["optimizer"], rel=0.2)


@pytest.mark.slow
def test_zero1_gives_each_rank_its_own_share_of_the_optimizer() -> None:
    ctx, parameters = job(llama(1)), sum(p.numel() for p in llama(1).parameters())
    shares = [simulated(ctx, ["zero1"], 2, rank=rank).moments[-1].memory["optimizer"] for rank in (0, 1)]
    assert sum(shares) == pytest.approx(2 * 4 * parameters, rel=0.01)  # Adam keeps two numbers a parameter


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


def test_compile_is_left_out_and_said() -> None:
    assert simulated(job(llama(1)), ["compile"], 1).notes[0].startswith("compile is left out")


def test_as_plain_data(sharded: Simulated) -> None:
    data = sharded.to_json_data()
    assert data["peak_bytes"] == max(sum(moment["memory"].values()) for moment in data["moments"])
    assert {each["kind"] for each in data["collectives"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(each["axes"] == ["data"] for each in data["collectives"])


def test_a_step_needs_an_optimizer_and_a_loss() -> None:
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
