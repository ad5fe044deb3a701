"""context_parallel: what it divides, worked by hand; what it does in a job, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tests.contract.test_cost_against_simulation as contract
from atorch.auto.opt_lib.context_parallel import ContextParallel
from atorch.auto.planner.estimate import useful_flops
from atorch.auto.planner.simulation import simulate
from atorch.auto.strategy import Strategy
from atorch.cost import peak_memory, plain_cost, step_time
from atorch.errors import AtorchError
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.sequence_parallel.token_partition import Tokens
from atorch.runtime.tensor_parallel.split_loss import VocabularyShards
from tests.auto.opt_lib import context_job
from tests.auto.opt_lib.context_job import BATCH, accelerated, trained
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of, on_mesh
from tests.auto.training import run_each
from tests.contract.job import make_model
from tests.pool import Pool
from tests.runtime.tensor_parallel.models import VOCAB, make

ALONE = ("parallel_mode", ([("context", 2)], None))
WITH_DATA = ("parallel_mode", ([("context", 2), ("data", 2)], None))
MICRO = ("micro_batch", {"size": 2})
TWO_AXES = ("parallel_mode", ([("sequence", 2), ("context", 2)], None))
OUT_OF_ORDER = ("context_parallel", {"load_balance": False})


def test_what_is_divided():
    cost = cost_of({"context": 4}, "context_parallel", "zero1")
    assert (cost.context, cost.num_params) == (4, 13_600)
    assert cost.optim_shards == 4
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000 / 4)  # the embedding is whole

    even, uneven = (
        cost_of({"context": 4}, ("context_parallel", {"load_balance": balance}), "ddp") for balance in (True, False)
    )
    assert even.segments == PROFILE.segments
    # Rows 3/4 to 1 of a triangle: 7/16 of it, where a quarter is the even share.
    assert uneven.attention_load == pytest.approx((7 / 16) / (1 / 4))
    assert useful_flops(uneven) == useful_flops(even), "the model needs as much"
    assert step_time(uneven, cluster(4)).matmul_s > step_time(even, cluster(4)).matmul_s

    assert list(ContextParallel.choices(PROFILE, cluster())) == [ContextParallel()]
    assert not list(ContextParallel.choices(PROFILE, cluster(devices=1)))
    without = replace(PROFILE, segments=(replace(BLOCK, attention_flops=0.0),))
    assert not list(ContextParallel.choices(without, cluster()))


@pytest.mark.parametrize(
    ("load_balance", "axes", "tokens", "reason"),
    [
        (True, {"context": 4}, 4096, None),
        (True, {"context": 4}, 4, "cuts sequences into 8 pieces"),
        (False, {"context": 4}, 4, None),
        (False, {"context": 4, "sequence": 2}, 4, "cuts sequences into 8 pieces"),
    ],
)
def test_where_sequences_cannot_be_cut(load_balance, axes, tokens, reason):
    cost = on_mesh(axes, segments=(replace(BLOCK, sequence_length=tokens),))
    found = ContextParallel(load_balance=load_balance).unfit(cost)
    assert (found is None) if reason is None else (reason in found)


BLOCKS = 2
EXACT, ROUNDED = 1e-4, 3e-2
"""Of the updates' norm, in fp32 and beside bf16."""


TRAINED: list[tuple[str, list[Any], int]] = [
    ("llama", [ALONE, "context_parallel"], 2),
    ("gpt2", [ALONE, OUT_OF_ORDER], 2),
    ("bert", [ALONE, "context_parallel"], 2),
    ("llama", [WITH_DATA, "context_parallel", "ddp", ("amp_native", "bf16")], 4),
    ("gpt2", [WITH_DATA, "context_parallel", "fsdp", "checkpoint"], 4),
    ("llama", [TWO_AXES, "context_parallel", "sequence_parallel"], 4),
]
MATRIX: list[tuple[str, list[Any], int]] = [
    ("bert", [TWO_AXES, OUT_OF_ORDER, "sequence_parallel", "checkpoint"], 4),
    ("gpt2", [ALONE, "context_parallel"], 2),
    ("bert", [ALONE, OUT_OF_ORDER], 2),
    ("bert", [WITH_DATA, "context_parallel", "fsdp"], 4),
    ("llama", [WITH_DATA, "context_parallel", "zero1", "checkpoint"], 4),
    ("llama", [WITH_DATA, "context_parallel", "zero2"], 4),
    ("llama", [WITH_DATA, "context_parallel", ("micro_batch", {"size": 1})], 4),
    ("llama", [ALONE, "context_parallel", ("checkpoint", {"selective": True})], 2),
    ("llama", [ALONE, "context_parallel", ("compile", {"backend": "aot_eager"})], 2),
    ("mixtral", [ALONE, "context_parallel"], 2),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("jobs", [TRAINED, pytest.param(MATRIX, marks=pytest.mark.nightly)], ids=["few", "all"])
def test_it_trains_as_one_process_does(pool: Pool, jobs: list[tuple[str, list[Any], int]], ranks: int) -> None:
    cases = [(name, strategy) for name, strategy, size in jobs if size == ranks]
    for (_, strategy), by_rank in zip(cases, run_each(pool, trained, cases, ranks=ranks, timeout=600), strict=True):
        named = [each if isinstance(each, str) else each[0] for each in strategy]
        band = ROUNDED if "amp_native" in named else EXACT
        pieces = BATCH // 2 if "micro_batch" in named else 1
        sends = pieces * BLOCKS * (4 if "checkpoint" in named else 3)
        for found in by_rank:
            assert found["update"] <= band, strategy
            assert found["loss"] <= max(1e-5, band if band > EXACT else 0), strategy
            assert {*found["sends"][1:]} == {sends}, strategy  # micro_batch compares, in the first step


@pytest.mark.slow
@pytest.mark.parametrize(
    "beside", [("checkpoint",), pytest.param((MICRO, ("half", "bf16")), marks=pytest.mark.nightly)], ids=str
)
def test_its_cost_is_what_a_simulation_sends(beside: tuple[Any, ...]) -> None:
    ctx, profile = contract.job(contract.llama, 4)
    strategy = Strategy.of([("parallel_mode", ([("context", 4)], None)), "context_parallel", "ddp", *beside])
    happened = simulate(ctx, strategy, contract.batch(), world_size=4, global_batch=contract.ROWS)
    promised = contract.promised(strategy.cost(plain_cost(profile, contract.ROWS)))
    calls, num_bytes = happened.collectives["send", ("context",)]
    assert (calls, num_bytes) == pytest.approx(promised["send", frozenset(("context",))])
    assert happened.collectives["receive", ("context",)] == (calls, num_bytes)


def refused(rank: int, size: int, model: nn.Module, strategy: list[Any]) -> tuple[str, bool]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(AtorchError) as caught:
        accelerated(model, "llama", strategy)
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return f"{type(caught.value).__name__}: {caught.value}", same


@pytest.mark.parametrize(
    ("model", "strategy", "ranks", "signs"),
    [
        (make_model(), [ALONE, "context_parallel"], 2, ["StrategyError", "model.layers.0", "sdpa", "module_replace"]),
        (
            make("llama"),
            [("parallel_mode", ([("context", 3)], None)), "context_parallel"],
            3,
            ["StrategyError", "model.layers.0", "16 tokens", "6 equal pieces", "multiple of 6"],
        ),
        (
            make("llama"),
            [("parallel_mode", ([("context", 2), ("sequence", 2)], None)), "context_parallel", "sequence_parallel"],
            4,
            ["StrategyError", "context, sequence", "give sequence before context"],
        ),
    ],
    ids=["eager", "pieces", "order"],
)
def test_it_is_refused_on_every_rank_with_the_model_as_it_was(
    pool: Pool, model: nn.Module, strategy: list[Any], ranks: int, signs: list[str]
) -> None:
    for told, same in pool.run(refused, model, strategy, ranks=ranks):
        assert all(sign in told for sign in signs), told
        assert same


def with_compiled_loss(rank: int, size: int) -> float:
    loss_func = torch.compile(context_job.loss_func, backend="eager")
    result = accelerated(make("llama"), "llama", [ALONE, "context_parallel"], loss_func=loss_func)
    batch = next(iter(result.dataloader))
    return float(result.loss_func(batch, result.model(**batch)))


def on_two_axes(rank: int, size: int) -> dict[str, Any]:
    mesh = ("parallel_mode", ([("tensor", 2), ("context", 2)], None))
    result = accelerated(make("llama"), "llama", [mesh, "tensor_parallel", "context_parallel"])
    batch = next(iter(result.dataloader))
    labels = batch["input_ids"]
    logits = result.model(**batch)["logits"]
    with CommCounter() as sent:
        F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)).backward()
    return {
        "kinds": [type(logits._layout), type(logits._part._layout)],
        "share": logits._part._part.numel() / logits.numel(),
        "gathered": sorted(each for (kind, _), (_, each) in sent.counts.items() if kind == "all_gather"),
        "tokens": labels.numel(),
    }


def test_logits_are_split_by_tokens_and_by_columns(pool: Pool) -> None:
    for seen in pool.run(on_two_axes, ranks=4):
        assert seen["kinds"] == [Tokens, VocabularyShards]
        assert seen["share"] == 1 / 4
        # A number a token; and of half of the tokens two numbers from each of two ranks.
        assert seen["gathered"] == [4 * seen["tokens"], 2 * 2 * 4 * seen["tokens"] / 2]

    _, losses = context_job.plain("llama")
    assert pool.run(with_compiled_loss) == pytest.approx([losses[0]] * 2, rel=1e-5)
