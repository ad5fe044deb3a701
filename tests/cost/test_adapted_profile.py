"""Adapters beside frozen weights, by hand."""

from dataclasses import replace

import pytest

from atorch.cost import peak_memory, plain_cost
from atorch.cost.adapted_profile import ALL_LINEAR, NF4_ITEMSIZE, Adapters, adapted_profile
from atorch.cost.parallelism import shard
from atorch.cost.transformer import Experts, Implementation, LatentAttention, TransformerShape, transformer_profile
from atorch.errors import ArgumentError

LLAMA = TransformerShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq_len=8192, head_dim=128
)
FEW = Adapters(rank=8)


def block(adapters: Adapters, shape: TransformerShape = LLAMA, keep: Implementation | None = None):
    return adapted_profile(shape, adapters, 1, keep).segments[1]


def test_adapters_have_two_thin_matrices_for_each_target() -> None:
    queries, values = 8 * (4096 + 4096), 8 * (4096 + 1024)
    profile = adapted_profile(LLAMA, FEW)
    assert profile.num_trainable == 32 * (queries + values) == 3_407_872  # as peft prints for Llama 3 8B
    assert profile.num_params == transformer_profile(LLAMA).num_params + profile.num_trainable
    assert profile.trainable_bytes == 2 * profile.num_trainable
    everywhere = adapted_profile(LLAMA, Adapters(rank=16, targets=ALL_LINEAR))
    assert everywhere.num_trainable == 41_943_040  # as peft prints for Llama 3 8B
    magnitudes = adapted_profile(LLAMA, replace(FEW, magnitudes=True))
    assert magnitudes.num_trainable == profile.num_trainable + 32 * (4096 + 1024)


def test_frozen_weights_have_no_states_and_are_gathered_as_they_are() -> None:
    memory = peak_memory(plain_cost(adapted_profile(LLAMA, FEW)))
    trained = 3_407_872
    assert memory.optimizer == 2 * 2 * trained
    assert memory.gradients <= 2 * trained
    assert memory.parameters == pytest.approx(2 * (8_030_261_248 + trained), rel=1e-6)

    cost = plain_cost(adapted_profile(LLAMA, replace(FEW, quantized_itemsize=NF4_ITEMSIZE))).replace(axes={"data": 8})
    sharded = shard(cost)
    plain = shard(plain_cost(adapted_profile(LLAMA, FEW)).replace(axes={"data": 8}))
    assert sharded.comm[0].num_bytes < 0.4 * plain.comm[0].num_bytes
    assert sharded.comm[1].num_bytes == plain.comm[1].num_bytes == 4 * 3_407_872  # gradients of adapters alone

    quantized = replace(FEW, quantized_itemsize=NF4_ITEMSIZE)
    memory = peak_memory(plain_cost(adapted_profile(LLAMA, quantized)))
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    rest = 8_030_261_248 - matrices
    assert memory.parameters == pytest.approx(NF4_ITEMSIZE * matrices + 2 * (rest + 3_407_872), rel=1e-6)
    assert all(each.stored_itemsize for each in block(quantized).matmuls if not each.trainable)
    # One weight at a time is whole, the largest of them: gate and up are one product here.
    kept = peak_memory(plain_cost(adapted_profile(replace(LLAMA, vocab=8), quantized)))
    without = peak_memory(plain_cost(adapted_profile(replace(LLAMA, vocab=8), FEW)))
    assert kept.working - without.working == 2 * 4096 * 2 * 14336


def test_experts_have_adapters_and_latent_attention_is_refused() -> None:
    shape = replace(LLAMA, experts=Experts(count=8, top_k=2, ffn=14336))
    found = block(Adapters(rank=8, targets=ALL_LINEAR), shape)
    of_experts = 8 * 8 * 3 * (4096 + 14336)
    assert found.expert_params == 8 * 3 * 4096 * 14336 + of_experts
    assert found.num_trainable == of_experts + 8 * (2 * 8192 + 2 * 5120)

    latent = LatentAttention(query_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    with pytest.raises(ArgumentError, match="latent attention"):
        adapted_profile(replace(LLAMA, latent=latent), FEW)
    with pytest.raises(ArgumentError, match="at least 1"):
        Adapters(rank=0)
