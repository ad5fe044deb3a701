"""context_parallel: what it divides, worked by hand, and what of logits and losses a process holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tests.contract.test_cost_against_simulation as contract
from atorch import auto_accelerate
from atorch.auto.opt_lib.context_parallel import ContextParallel
from atorch.auto.planner.estimate import useful_flops
from atorch.auto.planner.simulate.simulation import simulate
from atorch.auto.strategy import Strategy
from atorch.cost import peak_memory, plain_cost, step_time
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.sequence_parallel.token_partition import Tokens
from atorch.runtime.tensor_parallel.split_loss import VocabularyShards
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of
from tests.contract import job
from tests.pool import on_ranks

MICRO = ("micro_batch", {"size": 2})


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


def logits_and_loss(axes: list[Any], *methods: Any, **more: Any) -> tuple[Any, Any, Any]:
    """The result for the contract's model, its first batch and the logits."""
    mesh = ("parallel_mode", (axes, None))
    _, result, _ = auto_accelerate(job.make_model("sdpa"), load_strategy=[mesh, *methods], **job.arguments(**more))
    batch = next(iter(result.dataloader))
    return result, batch, result.model(**batch)


@on_ranks()
def test_a_compiled_loss_has_all_tokens(rank: int, size: int) -> None:
    compiled = torch.compile(job.loss_func, backend="eager")
    result, batch, output = logits_and_loss([("context", 2)], "context_parallel", loss_func=compiled)
    assert float(result.loss_func(batch, output)) == pytest.approx(job.reference()[1][0], rel=1e-5)


@on_ranks(4)
def test_logits_are_split_by_tokens_and_by_columns(rank: int, size: int) -> None:
    _, batch, output = logits_and_loss([("tensor", 2), ("context", 2)], "tensor_parallel", "context_parallel")
    logits, labels = output["logits"], batch["labels"]
    with CommCounter() as sent:
        F.cross_entropy(logits[:, :-1].reshape(-1, job.VOCAB), labels[:, 1:].reshape(-1)).backward()
    assert [type(logits._layout), type(logits._part._layout)] == [Tokens, VocabularyShards]
    assert logits._part._part.numel() / logits.numel() == 1 / 4
    gathered = sorted(each for (kind, _), (_, each) in sent.counts.items() if kind == "all_gather")
    # A number a token; and of half of the tokens two numbers from each of two ranks.
    assert gathered == [4 * labels.numel(), 2 * 2 * 4 * labels.numel() / 2]
