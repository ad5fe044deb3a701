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
from tests.contract.job import (
    BATCH,
    STEPS,
    Tokens,
    arguments,
    deviation,
    distance,
    loss_func,
    make_model,
    snapshot,
    updates,
)
from tests.pool import Pool

MEGATRON = SequenceParallel(mode="megatron")


def test_ulysses_divides_activations_and_no_parameters():
    cost = cost_of({"sequence": 4}, "sequence_parallel", "ddp")
    assert (cost.sequence, cost.tensor) == (4, 1)
    assert cost.num_params == 13_600
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000 / 4)  # the embedding is whole
    assert cost.comm[0].num_bytes == 54_400, "gradients are of a part of the tokens"


def test_fsdp_shards_over_the_processes_of_a_sequence():
    assert cost_of({"sequence": 4, "data": 2}, "sequence_parallel", "fsdp").param_shards == 8


def test_megatron_divides_what_tensor_parallel_leaves_whole():
    cost = cost_of({"tensor": 4}, "tensor_parallel", MEGATRON)
    assert (cost.tensor, cost.splits_norms, cost.sequence) == (4, True, 1)
    gathered = 2 * 600 * (1 - 1 / 4)  # what each block's products are given stays gathered for backward
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * (5000 / 4 + gathered))
    assert cost.num_params == cost_of({"tensor": 4}, "tensor_parallel").num_params


def test_each_mode_has_its_axis_or_its_companion():
    assert (SequenceParallel().splits, SequenceParallel().needs) == (("sequence",), ())
    assert (MEGATRON.splits, MEGATRON.needs) == ((), ("tensor_parallel",))


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


def test_both_modes_are_tried():
    assert list(SequenceParallel.choices(PROFILE, cluster())) == [SequenceParallel(), MEGATRON]
    assert not list(SequenceParallel.choices(PROFILE, cluster(devices=1)))


def model_of(attention: str = "sdpa") -> nn.Module:
    model: Any = make_model()
    model.set_attn_implementation(attention)
    return model


def sequence(size: int, **more: Any) -> Any:
    return "parallel_mode", ([("sequence", size), *more.items()], None)


def trained(rank: int, size: int, strategy: list[Any], clips: float | None) -> dict[str, Any]:
    """The documented loop under a strategy, against plain training on the same global batches."""
    model, plain = model_of(), model_of()
    before = snapshot(plain)
    _, result, used = auto_accelerate(model, load_strategy=strategy, **arguments())
    norms, losses = [], []
    for batch in result.dataloader:
        batch = result.prepare_input(batch, torch.device("cpu"))
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        if clips is not None:
            norms.append(float(clip_grad_norm(result.model, clips)))
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
    optim, expected_norms, expected_losses = torch.optim.SGD(plain.parameters(), lr=0.1), [], []
    for step in range(STEPS):
        tokens = Tokens().tokens[step * BATCH : (step + 1) * BATCH]
        loss = loss_func({"labels": tokens}, plain(input_ids=tokens))
        loss.backward()
        if clips is not None:
            expected_norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), clips)))
        optim.step()
        optim.zero_grad()
        expected_losses.append(loss.item())
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return {
        "update": distance(updates(before, snapshot(result.model)), updates(before, snapshot(plain))),
        "loss": float((mean / size - torch.tensor(expected_losses)).abs().max()),
        "norms": max((abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)), default=0.0),
        "methods": used.names(),
        "held": sum(p.numel() for p in result.model.parameters()) / sum(p.numel() for p in plain.parameters()),
        "rows": len(next(iter(result.dataloader))["input_ids"]),
    }


def test_trains_as_one_process_and_ddp_is_added(pool: Pool) -> None:
    for seen in pool.run(trained, [sequence(2), "sequence_parallel"], 0.05):
        assert seen["update"] <= 1e-4
        assert seen["loss"] <= 1e-5
        assert seen["norms"] <= 1e-4
        assert seen["methods"] == ("parallel_mode", "sequence_parallel", "ddp")
        assert seen["rows"] == BATCH, "every rank has all samples"


@pytest.mark.parametrize(
    "methods",
    [
        ("fsdp", "checkpoint"),
        pytest.param(("ddp",), marks=pytest.mark.nightly),
        pytest.param(("zero1", "micro_batch"), marks=pytest.mark.nightly),
        pytest.param(("zero2", "compile"), marks=pytest.mark.nightly),
    ],
    ids="+".join,
)
def test_beside_data(pool: Pool, methods: tuple[str, ...]) -> None:
    knobs = {"micro_batch": {"size": 2}, "compile": {"backend": "aot_eager"}}
    strategy = [sequence(2, data=2), "sequence_parallel", *((name, knobs.get(name)) for name in methods)]
    for seen in pool.run(trained, strategy, 0.05, ranks=4):
        assert seen["update"] <= 1e-4
        assert seen["loss"] <= 1e-5
        assert seen["norms"] <= 1e-4
        assert seen["rows"] == BATCH // 2


def test_beside_tensor_heads_are_shared_out_over_both(pool: Pool) -> None:
    mesh = ("parallel_mode", ([("tensor", 2), ("sequence", 2)], None))
    for seen in pool.run(trained, [mesh, "tensor_parallel", "sequence_parallel"], 0.05, ranks=4):
        assert seen["update"] <= 1e-4
        assert seen["loss"] <= 1e-5
        assert seen["norms"] <= 1e-4
        assert seen["held"] < 0.51


@pytest.mark.parametrize(
    "methods",
    [("fsdp", "checkpoint"), pytest.param(("ddp",), marks=pytest.mark.nightly)],
    ids="+".join,
)
def test_megatron_beside_data(pool: Pool, methods: tuple[str, ...]) -> None:
    mesh = ("parallel_mode", ([("tensor", 2), ("data", 2)], None))
    for seen in pool.run(trained, [mesh, "tensor_parallel", MEGATRON, *methods], 0.05, ranks=4):
        assert seen["update"] <= 1e-4
        assert seen["loss"] <= 1e-5
        assert seen["norms"] <= 1e-4


def test_megatron_alone_is_refused(pool: Pool) -> None:
    for message in pool.run(refused, "sdpa", [MEGATRON], {}):
        assert "completes tensor_parallel, which is not in the strategy" in message


class OddTokens(Tokens):
    """Sequences that two processes cannot share out."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: each[:-1] for name, each in super().__getitem__(index).items()}


def refused_before_the_cut(rank: int, size: int) -> tuple[str, bool]:
    model = model_of()
    before = snapshot(model)
    mesh = ("parallel_mode", ([("tensor", 2)], None))
    with pytest.raises(AtorchError) as caught:
        auto_accelerate(model, load_strategy=[mesh, "tensor_parallel", MEGATRON], **arguments(dataset=OddTokens()))
    after = dict(model.named_parameters())
    return str(caught.value), all(torch.equal(after[name], value) for name, value in before.items())


def test_megatron_refuses_tokens_that_cannot_be_cut_before_anything_is(pool: Pool) -> None:
    for message, is_as_it_was in pool.run(refused_before_the_cut):
        assert "give sequences of a multiple of 2 tokens" in message
        assert is_as_it_was


@pytest.mark.nightly
def test_shards_beside_replicas(pool: Pool) -> None:
    strategy = [sequence(2, zero=2, data=2), "sequence_parallel", "fsdp"]
    for seen in pool.run(trained, strategy, 0.05, ranks=8):
        assert seen["update"] <= 1e-4
        assert seen["norms"] <= 1e-4


def refused(rank: int, size: int, attention: str, strategy: list[Any], more: dict[str, Any]) -> str:
    with pytest.raises(AtorchError) as caught:
        auto_accelerate(model_of(attention), load_strategy=strategy, **arguments(**more))
    return str(caught.value)


def test_attention_that_is_written_out_is_refused_with_the_remedy(pool: Pool) -> None:
    for message in pool.run(refused, "eager", [sequence(2), "sequence_parallel"], {}):
        assert "model.layers.0 calls no scaled_dot_product_attention" in message
        assert "attn_implementation='sdpa'" in message


def test_module_replace_is_the_other_remedy(pool: Pool) -> None:
    for error, _ in pool.run(deviation, [sequence(2), "module_replace", "sequence_parallel"]):
        assert error <= 1e-4


def test_without_a_batch_to_watch_the_model_on_it_says_so(pool: Pool) -> None:
    for message in pool.run(refused, "sdpa", [sequence(2), "sequence_parallel"], {"dataset": None}):
        assert "sequence_parallel watches the model at work" in message
        assert "sample_batch" in message
