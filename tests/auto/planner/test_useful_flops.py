"""FLOPs that a model needs, which no strategy changes."""

from dataclasses import replace

import pytest

from atorch.auto.planner.estimate import useful_flops, utilisation_peak
from atorch.auto.strategy import Strategy
from atorch.cost import plain_cost
from atorch.cost.transformer import TransformerShape, transformer_profile
from tests.profiler.totals import total

SHAPE = TransformerShape(layers=4, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=1000, seq_len=128, head_dim=64)


def test_six_times_the_weights_for_each_token_and_attention():
    profile = transformer_profile(SHAPE)
    weights = 4 * (4 * 256 * 256 + 3 * 256 * 512) + 256 * 1000
    scores = 4 * 2 * 2 * 128 * 128 * 256 / 2  # two products, of which causal attention computes half
    assert useful_flops(plain_cost(profile, 8)) == pytest.approx(8 * (6 * 128 * weights + 3 * scores), rel=0.01)

    profile = transformer_profile(SHAPE)
    frozen = replace(
        profile,
        segments=tuple(
            replace(each, matmuls=tuple(replace(product, trainable=False) for product in each.matmuls))
            for each in profile.segments
        ),
    )
    attention = 3 * 8 * total(profile, "attention_flops")
    assert useful_flops(plain_cost(frozen, 8)) - attention == pytest.approx(
        (useful_flops(plain_cost(profile, 8)) - attention) * 2 / 3
    )


def test_no_strategy_changes_them_and_the_peak_is_of_16_bits():
    plain = plain_cost(transformer_profile(SHAPE), 64)
    for methods in (
        [("parallel_mode", ([("data", 8)], None)), "zero2", "checkpoint"],
        [("parallel_mode", ([("tensor", 4), ("data", 2)], None)), "tensor_parallel", "ddp", ("half", "bf16")],
        [("parallel_mode", ([("pipeline", 4), ("zero", 2)], None)), "pipeline_parallel", "fsdp"],
    ):
        assert useful_flops(Strategy.of(methods).cost(plain)) == pytest.approx(useful_flops(plain))

    assert utilisation_peak({"float32": 1.0, "float16": 2.0, "float8": 4.0}) == 2.0
    assert utilisation_peak({"float32": 1.0, "bfloat16": 3.0, "float16": 2.0}) == 3.0
    assert utilisation_peak({"float32": 1.0}) == 1.0
    assert utilisation_peak({}) == 0.0
