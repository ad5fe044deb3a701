"""Ranks along sequence and context have their own tokens outside of blocks: bytes and collectives."""

from dataclasses import replace

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.strategy import Strategy
from atorch.cost import peak_memory, plain_cost
from atorch.cost.comm import of_copy, tokens_share
from atorch.cost.transformer import TransformerShape, transformer_profile

GiB = 2**30
LLAMA = TransformerShape(
    layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq_len=2**20, head_dim=128
)  # Llama 3.1 405B, a sample of 2^20 tokens
H100 = 79.1 * GiB


def cost_of(axes, *methods, profile=None):
    samples = dict(axes).get("data", 1)
    mesh = ("parallel_mode", (list(axes.items()), None))
    return Strategy.of([mesh, *methods]).cost(plain_cost(profile or transformer_profile(LLAMA), samples))


def test_a_million_tokens_of_405b_fit_on_16384_devices():
    methods = [("half", "bf16"), "context_parallel", "tensor_parallel", "fsdp", ("checkpoint", {"selective": True})]
    cost = cost_of({"tensor": 4, "context": 512, "data": 8}, *methods)
    assert cost.own_tokens
    assert peak_memory(cost).reserved <= 0.92 * H100
    short = peak_memory(cost.replace(own_tokens=False)).total - 0.92 * H100
    assert short > 100 * GiB  # whole embeddings and logits


def test_logits_are_a_ranks_share():
    profile = transformer_profile(replace(LLAMA, layers=1, seq_len=2**16))
    profile = replace(profile, segments=tuple(segment for segment in profile.segments if not segment.is_block))
    whole, split = (
        peak_memory(cost_of(axes, "context_parallel", "ddp", profile=profile)).activations
        for axes in ({"data": 8}, {"context": 8, "data": 1})
    )
    assert split * 8 == pytest.approx(whole)


@pytest.mark.parametrize("method", ["context_parallel", "sequence_parallel"])
def test_a_number_a_token_is_gathered_and_no_stream(method):
    axis = method.split("_")[0]
    cost = cost_of({axis: 8}, method)
    head = next(each for each in cost.segments if each.num_losses)
    assert [(each.kind, each.axis, each.count, each.num_bytes) for each in of_copy(cost, head)] == [
        ("all_gather", (axis,), 1.0, 4.0 * 2**20)
    ]
    blocks = [each for segment in cost.segments if segment.is_block for each in of_copy(cost, segment)]
    assert "all_gather" not in {each.kind for each in blocks}


def without_losses():
    profile = transformer_profile(LLAMA)
    return replace(profile, segments=tuple(replace(each, num_losses=0) for each in profile.segments))


@pytest.mark.parametrize(
    ("axes", "profile"), [({"context": 8, "pipeline": 2}, None), ({"context": 8}, without_losses())]
)
def test_all_tokens_are_there_for_a_pipeline_and_for_a_loss_that_asks_for_them(axes, profile):
    methods = ["context_parallel", *(["pipeline_parallel"] if "pipeline" in axes else [])]
    cost = cost_of(axes, *methods, profile=profile)
    head = cost.segments[-1]
    assert not cost.own_tokens
    assert tokens_share(cost, head) == pytest.approx(
        8 * tokens_share(cost, next(s for s in cost.segments if s.is_block))
    )
