"""What attention takes by kernel, head, mask and length, beside what its authors published."""

from dataclasses import replace

import pytest

from atorch.cluster.spec import ClusterSpec
from atorch.cost import Region, Segment
from atorch.cost.gemm import ProductTimes
from atorch.cost.kernels import fused_seconds, written_seconds

A100, H100 = (ClusterSpec.load(name).device for name in ("a100_80g", "h100_80g"))
ALONE = {
    device.name: replace(device, efficiency=replace(device.efficiency, attention=1.0, traffic=0.85))
    for device in (A100, H100)
}

# Dao 2023, arXiv 2307.08691, figures 4 and 7: TFLOP/s forward and backward, 16,384 tokens in all, 2,048 features.
FLASH2 = {
    ("NVIDIA A100-SXM4-80GB", 64, False): {512: 132, 2048: 162, 8192: 175, 16384: 176},
    ("NVIDIA A100-SXM4-80GB", 128, False): {512: 150, 2048: 187, 8192: 201, 16384: 203},
    ("NVIDIA A100-SXM4-80GB", 64, True): {512: 88, 2048: 140, 8192: 165, 16384: 171},
    ("NVIDIA A100-SXM4-80GB", 128, True): {512: 99, 2048: 155, 8192: 182, 16384: 189},
    ("NVIDIA H100 80GB HBM3", 64, False): {512: 215, 2048: 274, 8192: 294, 16384: 296},
    ("NVIDIA H100 80GB HBM3", 128, False): {512: 248, 2048: 320, 8192: 335, 16384: 338},
    ("NVIDIA H100 80GB HBM3", 64, True): {512: 141, 2048: 232, 8192: 273, 16384: 284},
    ("NVIDIA H100 80GB HBM3", 128, True): {512: 163, 2048: 265, 8192: 308, 16384: 328},
}


def attending(head, tokens, *, is_causal=True, features=2048, kv_share=1):
    heads = features // head
    return Segment(
        name="", num_params=0, num_trainable=0, num_heads=heads, num_kv_heads=heads // kv_share, head_dim=head,
        is_causal=is_causal, sequence_length=tokens, inside=Region(),
    )  # fmt: skip


def flops_of(tokens, is_causal, features=2048, in_all=16384):
    return 4.0 * in_all * tokens * features / (2 if is_causal else 1)


@pytest.mark.parametrize(("name", "head", "is_causal"), list(FLASH2))
def test_the_second_flash_attention_is_as_fast_as_its_paper_says(name, head, is_causal):
    products = ProductTimes(ALONE[name])
    for tokens, tflops in FLASH2[name, head, is_causal].items():
        flops = flops_of(tokens, is_causal)
        taken = fused_seconds(attending(head, tokens, is_causal=is_causal), "flash2", flops, 0.0, "bfloat16", products)
        assert 3.5 * flops / taken / 1e12 == pytest.approx(tflops, rel=0.12)


def test_kernels_differ_by_device():
    def times(device, kernel):
        segment = attending(128, 8192)
        return fused_seconds(segment, kernel, flops_of(8192, True), 0.0, "bfloat16", ProductTimes(device))

    assert times(H100, "flash3") < 0.65 * times(H100, "flash2")
    assert times(A100, "triton") > 2 * times(A100, "flash2")
    assert times(A100, "") == times(A100, "flash2")  # what PyTorch takes
    assert 1.5 < times(A100, "flash2") / times(H100, "flash2") < 2.0


def test_forward_again_costs_a_forward():
    segment, products = attending(128, 4096), ProductTimes(ALONE[A100.name])
    flops = flops_of(4096, True)
    once, again = (fused_seconds(segment, "flash2", flops, each, "bfloat16", products) for each in (0.0, 1.0))
    assert 0.22 < (again - once) / once < 0.34


def test_few_heads_and_tokens_leave_multiprocessors_idle():
    segment, products = attending(64, 1024, features=128), ProductTimes(H100)  # two heads: 16 tiles for 132
    few = fused_seconds(segment, "flash2", flops_of(1024, True, 128, 1024), 0.0, "bfloat16", products)
    many = fused_seconds(segment, "flash2", flops_of(1024, True, 128, 8192), 0.0, "bfloat16", products)
    assert many < 1.5 * few


def test_written_scores_take_longer_than_fused_attention_and_longer_sequences_longer():
    taken = []
    for tokens in (512, 1024, 2048, 4096):
        segment, products = attending(64, tokens, is_causal=False), ProductTimes(A100)
        flops = flops_of(tokens, False)
        taken.append(written_seconds(segment, flops, 0.0, "bfloat16", products))
        assert taken[-1] > fused_seconds(segment, "flash2", flops, 0.0, "bfloat16", products)
    assert taken == sorted(taken)
