"""Closed forms of transformers against published parameter counts, published formulas, and a small one by hand."""

from dataclasses import replace

import pytest
import torch
import transformers

from atorch.cost.transformer import Experts, Implementation, LatentAttention, TransformerShape, transformer_profile
from atorch.profiler.trace import trace
from tests.profiler.totals import total

LLAMA = TransformerShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192, head_dim=128
)
GPT = TransformerShape(
    layers=24, hidden=2048, heads=16, kv_heads=16, ffn=8192, vocab=50304, seq_len=1024, head_dim=128, gated=False,
    tied=True, norm="layernorm", learned_positions=True, bias=True,
)  # fmt: skip
DEEPSEEK = TransformerShape(
    layers=61, hidden=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, seq_len=4096, head_dim=56,
    experts=Experts(count=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    latent=LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)  # fmt: skip
MIXTRAL = replace(
    LLAMA, ffn=14336, vocab=32000, experts=Experts(count=8, top_k=2, ffn=14336)
)  # as published, at 4,096 tokens


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        (LLAMA, 8.03),  # Llama 3 8B
        (replace(LLAMA, layers=80, hidden=8192, heads=64, ffn=28672), 70.55),  # Llama 3 70B
        (replace(LLAMA, layers=126, hidden=16384, heads=128, ffn=53248), 405.85),  # Llama 3.1 405B
        (MIXTRAL, 46.70),  # Mixtral 8x7B
        (DEEPSEEK, 671.03),  # DeepSeek-V3 without its multi-token prediction module
        (
            replace(GPT, layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072, vocab=50257, head_dim=64),
            0.12444,
        ),  # GPT-2
    ],
)
def test_parameters_are_those_published(shape, billions):
    assert transformer_profile(shape).num_params / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_gpt_block_keeps_what_korthikanti_counts(batch):
    plain = Implementation(flash_attention=False, dropout=True)
    block = transformer_profile(GPT, batch, plain).segments[1]
    tokens, hidden, heads, seq = batch * 1024, 2048, 16, 1024
    assert block.saved_bytes == tokens * (34 * hidden + 5 * heads * seq)
    # 10 of the 34 are outside of what tensor parallelism divides (section 4.2.1).
    assert block.outside.saved_bytes == 10 * tokens * hidden
    # What a selective recomputation keeps is without the scores.
    assert block.inside.selective_bytes < block.inside.saved_bytes - 5 * tokens * heads * seq + 1


def test_products_of_a_block_are_twice_its_weights_for_every_token():
    profile = transformer_profile(LLAMA, 2)
    block = profile.segments[1]
    norms = 2 * 4096
    assert block.matmul_flops == 2 * (block.num_params - norms) * 2 * 8192
    # Two products of scores and values, of which causal flash attention computes half: Dao et al. 2022.
    assert block.attention_flops == 2 * (4 * 8192 * 8192 * 4096) / 2
    written = transformer_profile(LLAMA, 2, Implementation(flash_attention=False)).segments[1]
    assert written.attention_flops == 2 * block.attention_flops


def test_experts_compute_what_arrives_and_hold_all_of_them():
    _, mixture, _ = transformer_profile(MIXTRAL).segments
    expert = 3 * 4096 * 14336
    assert mixture.expert_params == 8 * expert
    routed = sum(each.flops for each in mixture.matmuls if each.of_experts)
    assert routed == 2 * 2 * expert * 8192  # each token twice
    assert mixture.dispatched_bytes == 2 * 8192 * 4096 * 2
    assert (mixture.num_experts, mixture.count) == (8, 32)


def test_runs_of_dense_blocks_and_of_blocks_with_experts():
    names = [(each.name, each.count) for each in transformer_profile(DEEPSEEK).segments]
    assert names == [("embedding", 1), ("blocks", 3), ("expert_blocks", 58), ("head", 1)]
    few = transformer_profile(replace(DEEPSEEK, layers=2)).segments
    assert [(each.name, each.count) for each in few] == [("embedding", 1), ("blocks", 2), ("head", 1)]


def test_a_tied_head_has_the_embedding_s_table():
    tied, untied = (transformer_profile(replace(LLAMA, tied=each)).segments[-1] for each in (True, False))
    assert (tied.tied_params, tied.split_params) == (128256 * 4096, 0)
    assert (untied.tied_params, untied.split_params) == (0, 128256 * 4096)
    assert tied.matmul_flops == untied.matmul_flops == 2 * 8192 * 128256 * 4096


@pytest.mark.parametrize(
    ("keeps", "more"),
    [
        ({"fused_norm": False}, 2 * 4 * 4096),  # a norm's input in fp32, and what it was normalised to
        ({"fused_activation": False}, 2 * 14336),
        ({"packed_values": True}, 2 * (4096 + 1024)),
        ({"dropout": True}, 2 * 4096),
        ({"flash_attention": False}, 2 * 32 * 8192 - 4 * 32),
    ],
)
def test_what_an_implementation_keeps_beside(keeps, more):
    plain, other = (transformer_profile(LLAMA, 1, Implementation(**each)).segments[1] for each in ({}, keeps))
    assert other.saved_bytes - plain.saved_bytes == more * 8192


def test_the_loss_keeps_and_needs_bytes_of_every_logit():
    head = transformer_profile(LLAMA, 1, Implementation(logit_bytes=2.0, loss_bytes=3.0)).segments[-1]
    logits = 8192 * 128256
    assert (head.inside.saved_bytes, head.working_bytes, head.split_working) == (2 * logits, 3 * logits, True)


def test_figures_grow_with_the_batch_and_parameters_do_not():
    one, four = transformer_profile(DEEPSEEK), transformer_profile(DEEPSEEK, 4)
    assert total(four, "saved_bytes") == 4 * total(one, "saved_bytes")
    assert total(four, "matmul_flops") == 4 * total(one, "matmul_flops")
    assert (four.num_params, four.batch_size) == (one.num_params, 4)
    assert four.param_bytes == 2 * four.num_params


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_a_block_calls_as_many_operators_as_the_traced_one(kind):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = getattr(transformers, f"{kind}Config")(num_attention_heads=2, use_cache=False, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, 8, dtype=torch.long)
    traced = trace(model, ids, lambda m, batch: m(batch, labels=batch), lambda batch, output: output[0])
    shape = replace(LLAMA if kind == "Llama" else GPT, layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, seq_len=8)
    said = transformer_profile(shape, 1, Implementation(dropout=kind == "Bert")).segments[1]
    assert said.num_ops == pytest.approx(traced.blocks[0].num_ops, rel=0.3)
