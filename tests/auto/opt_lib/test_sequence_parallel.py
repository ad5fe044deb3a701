"""sequence_parallel: what is divided, worked by hand, what cannot be; and that it trains as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch import auto_accelerate, clip_grad_norm
from atorch.auto.opt_lib.context_parallel import ContextParallel
from atorch.auto.opt_lib.module_replace import ModuleReplace
from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.cost import peak_memory
from atorch.errors import AtorchError
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of, on_mesh
from tests.auto.training import accelerated_steps, run_each, steps
from tests.contract import job
from tests.pool import Pool

MEGATRON = SequenceParallel(mode="megatron")
MAX_NORM = 0.05


def test_what_is_divided():
    cost = cost_of({"sequence": 4}, "sequence_parallel", "ddp")
    assert (cost.sequence, cost.tensor) == (4, 1)
    assert cost.num_params == 13_600
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000 / 4)  # the embedding is whole
    assert cost.comm[0].num_bytes == 54_400, "gradients are of a part of the tokens"

    assert cost_of({"sequence": 4, "data": 2}, "sequence_parallel", "fsdp").param_shards == 8

    cost = cost_of({"tensor": 4}, "tensor_parallel", MEGATRON)
    assert (cost.tensor, cost.splits_norms, cost.sequence) == (4, True, 1)
    gathered = 2 * 600 * (1 - 1 / 4)  # what each block's products are given stays gathered for backward
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * (5000 / 4 + gathered))
    assert cost.num_params == cost_of({"tensor": 4}, "tensor_parallel").num_params

    assert (SequenceParallel().splits, SequenceParallel().needs) == (("sequence",), ())
    assert (MEGATRON.splits, MEGATRON.needs) == ((), ("tensor_parallel",))

    assert list(SequenceParallel.choices(PROFILE, cluster())) == [SequenceParallel(), MEGATRON]
    assert not list(SequenceParallel.choices(PROFILE, cluster(devices=1)))


@pytest.mark.parametrize(
    ("method", "axes", "changes", "reason"),
    [
        (SequenceParallel(), {"sequence": 8}, {}, None),
        (SequenceParallel(), {"tensor": 2, "sequence": 4}, {}, None),
        (SequenceParallel(), {"tensor": 4, "sequence": 4}, {}, "tensor × sequence 16 does not divide the 8 attention"),
        (SequenceParallel(), {"sequence": 4}, {"sequence_length": 1026}, "into 4 pieces"),
        (MEGATRON, {"tensor": 4}, {}, None),
        (MEGATRON, {"tensor": 4}, {"sequence_length": 1026}, "does not divide their 1026 tokens"),
    ],
)
def test_what_it_cannot_divide(method, axes, changes, reason):
    found = method.unfit(on_mesh(axes, segments=(replace(BLOCK, **changes),)))
    assert (found is None) if reason is None else (reason in found)


def test_tokens_meet_in_fused_attention_alone():
    written, replaceable = (on_mesh({"sequence": 4}, attention=each) for each in ("written", "replaceable"))
    assert "scaled_dot_product_attention" in SequenceParallel().unfit(written)
    assert "add module_replace" in SequenceParallel().unfit(replaceable)
    assert SequenceParallel().unfit(ModuleReplace().cost(replaceable)) is None
    assert "let their attention call it" in SequenceParallel().unfit(ModuleReplace().cost(written))
    assert "scaled_dot_product_attention" in ContextParallel().unfit(on_mesh({"context": 4}, attention="written"))
    assert MEGATRON.unfit(on_mesh({"tensor": 4}, attention="written")) is None, "attention has all tokens"


def model_of(attention: str = "sdpa") -> nn.Module:
    model: Any = job.make_model()
    model.set_attn_implementation(attention)
    return model


def sequence(size: int, **more: Any) -> Any:
    return "parallel_mode", ([("sequence", size), *more.items()], None)


def trained(rank: int, size: int, strategy: list[Any]) -> dict[str, Any]:
    """The documented loop under a strategy, against plain training on the same global batches."""
    model, plain = model_of(), model_of()
    before = job.snapshot(plain)
    _, result, used = auto_accelerate(model, load_strategy=strategy, **job.arguments())
    losses, norms = accelerated_steps(result, lambda model: clip_grad_norm(model, MAX_NORM))
    expected_losses, expected_norms = steps(
        plain,
        torch.optim.SGD(plain.parameters(), lr=0.1),
        job.loss_func,
        ({"input_ids": tokens, "labels": tokens} for tokens in job.Tokens().tokens.split(job.BATCH)),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    )
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return {
        "update": job.distance(
            job.updates(before, job.snapshot(result.model)), job.updates(before, job.snapshot(plain))
        ),
        "loss": float((mean / size - torch.tensor(expected_losses)).abs().max()),
        "norms": max(abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)),
        "methods": used.names(),
        "held": sum(p.numel() for p in result.model.parameters()) / sum(p.numel() for p in plain.parameters()),
        "rows": len(next(iter(result.dataloader))["input_ids"]),
    }


def test_trains_as_one_process_and_ddp_is_added(pool: Pool) -> None:
    for seen in pool.run(trained, [sequence(2), "sequence_parallel"]):
        assert seen["update"] <= 1e-4
        assert seen["loss"] <= 1e-5
        assert seen["norms"] <= 1e-4
        assert seen["methods"] == ("parallel_mode", "sequence_parallel", "ddp")
        assert seen["rows"] == job.BATCH, "every rank has all samples"


ULYSSES = [sequence(2, data=2), "sequence_parallel"]
ON_TENSOR = [("parallel_mode", ([("tensor", 2), ("data", 2)], None)), "tensor_parallel", MEGATRON]
ON_BOTH = [("parallel_mode", ([("tensor", 2), ("sequence", 2)], None)), "tensor_parallel", "sequence_parallel"]
FEW: list[list[Any]] = [[*ULYSSES, "fsdp", "checkpoint"], ON_BOTH, [*ON_TENSOR, "fsdp", "checkpoint"]]
MANY: list[list[Any]] = [
    [*ULYSSES, "ddp"],
    [*ULYSSES, "zero1", ("micro_batch", {"size": 2})],
    [*ULYSSES, "zero2", ("compile", {"backend": "aot_eager"})],
    [*ON_TENSOR, "ddp"],
]


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)], ids=["few", "many"])
def test_beside_data_and_tensor(pool: Pool, strategies: list[list[Any]]) -> None:
    by_case = run_each(pool, trained, [(strategy,) for strategy in strategies], ranks=4)
    for strategy, by_rank in zip(strategies, by_case, strict=True):
        for seen in by_rank:
            assert seen["update"] <= 1e-4, strategy
            assert seen["loss"] <= 1e-5, strategy
            assert seen["norms"] <= 1e-4, strategy
            assert seen["rows"] == (job.BATCH if strategy is ON_BOTH else job.BATCH // 2)
            assert strategy is not ON_BOTH or seen["held"] < 0.51, "heads are shared out over both"


class OddTokens(job.Tokens):
    """Sequences that two processes cannot share out."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: each[:-1] for name, each in super().__getitem__(index).items()}


def refused_before_the_cut(rank: int, size: int) -> tuple[str, bool]:
    model = model_of()
    before = job.snapshot(model)
    mesh = ("parallel_mode", ([("tensor", 2)], None))
    with pytest.raises(AtorchError) as caught:
        auto_accelerate(model, load_strategy=[mesh, "tensor_parallel", MEGATRON], **job.arguments(dataset=OddTokens()))
    after = dict(model.named_parameters())
    return str(caught.value), all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.nightly
def test_shards_beside_replicas(pool: Pool) -> None:
    strategy = [sequence(2, zero=2, data=2), "sequence_parallel", "fsdp"]
    for seen in pool.run(trained, strategy, ranks=8):
        assert seen["update"] <= 1e-4
        assert seen["norms"] <= 1e-4


def refused(rank: int, size: int, attention: str, strategy: list[Any], more: dict[str, Any]) -> str:
    with pytest.raises(AtorchError) as caught:
        auto_accelerate(model_of(attention), load_strategy=strategy, **job.arguments(**more))
    return str(caught.value)


ALONE = [sequence(2), "sequence_parallel"]


REFUSED: list[tuple[tuple[str, list[Any], dict[str, Any]], list[str]]] = [
    (("sdpa", [MEGATRON], {}), ["completes tensor_parallel, which is not in the strategy"]),
    (("eager", ALONE, {}), ["model.layers.0 calls no scaled_dot_product_attention", "attn_implementation='sdpa'"]),
    (("sdpa", ALONE, {"dataset": None}), ["sequence_parallel watches the model at work", "sample_batch"]),
]


def test_what_does_not_hold_is_refused_with_the_remedy(pool: Pool) -> None:
    by_case = run_each(pool, refused, [case for case, _ in REFUSED])
    for (_, signs), by_rank in zip(REFUSED, by_case, strict=True):
        assert all(sign in message for sign in signs for message in by_rank), by_rank
    for message, is_as_it_was in pool.run(refused_before_the_cut):
        assert "give sequences of a multiple of 2 tokens" in message
        assert is_as_it_was
    for error, _ in pool.run(job.deviation, [sequence(2), "module_replace", "sequence_parallel"]):
        assert error <= 1e-4, "module_replace is the other remedy"
