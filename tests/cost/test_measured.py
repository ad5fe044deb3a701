"""Estimates beside what was measured on a GPU: products, attention and steps on an H200, `benchmarks/measured`."""

import json
import math
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from atorch.auto.plan_for_cluster import subject_of
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import ModelProfile, peak_memory, plain_cost, step_seconds
from atorch.cost.gemm import GemmShape, ProductTimes
from atorch.cost.kernels import _pitch, fused_seconds
from atorch.cost.profile import Segment

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks" / "measured" / "h200.json").read_text())
H200 = ClusterSpec.load("H200", num_nodes=1, devices_per_node=1)
PRODUCTS = ProductTimes(H200.device)
BATCH = {512: 16, 1024: 8, 2048: 4, 4096: 2, 8192: 1, 32768: 1}  # of the attention that was measured, by its tokens
GIB = 2**30


def said_of_products(name: str) -> Iterator[tuple[float, float]]:
    """Seconds as estimated, and FLOPs, of a product forward, of its weight's gradient and of its input's."""
    rows, inner, columns = map(float, name.split(","))
    pitch = _pitch(inner, columns)
    for shape in ((rows, inner, columns), (columns, rows, inner), (rows, columns, inner)):
        yield PRODUCTS.seconds(GemmShape(*shape, "bfloat16", 2.0, 2.0, 1.0, pitch)), 2.0 * math.prod(shape)


def test_products() -> None:
    """Calls in a row; those of less than a tenth of a millisecond wait for the host, and are in a graph beside."""
    ratios = []
    for name, rates in MEASURED["products_tflops"].items():
        for (said, flops), rate in zip(said_of_products(name), rates, strict=True):
            if flops > 5e10:
                ratios.append(said * rate * 1e12 / flops)
    for name, measured in MEASURED["products_us"].items():
        ratios += [said * 1e6 / us for (said, _), us in zip(said_of_products(name), measured, strict=True)]
    assert len(ratios) > 100
    assert min(ratios) > 0.8
    assert max(ratios) < 2.0
    assert sum(each < 1.4 for each in ratios) > 0.97 * len(ratios)
    assert statistics.mean(abs(each - 1) for each in ratios) < 0.16


def test_attention() -> None:
    """All kernels, the one that PyTorch takes among them; clocks fall in training, so that some more is said."""
    ratios = {}
    for name, rates in MEASURED["attention_tflops"].items():
        kernel, features, tokens, mask = name.split()
        head, length, is_causal = int(features[1:]), int(tokens[1:]), mask == "causal"
        if isinstance(rates, str) or length < 1024:
            continue
        flops = 4.0 * BATCH[length] * 32 * length**2 * head / (1 + is_causal)
        segment = Segment(
            name="attention", num_params=0, num_trainable=0, head_dim=head, sequence_length=length, is_causal=is_causal,
            num_heads=32, num_kv_heads=32,
        )  # fmt: skip
        said = fused_seconds(segment, "" if kernel == "default" else kernel, flops, 0.0, "bfloat16", PRODUCTS)
        ratios[name] = said / (flops / rates[0] + 2.5 * flops / rates[1]) * 1e12
    assert len(ratios) > 40
    assert all(0.85 < each < 1.2 for each in ratios.values()), ratios
    assert statistics.mean(abs(each - 1) for each in ratios.values()) < 0.07


@cache
def llama(rows: int = 4) -> ModelProfile:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(rows, 2048, dtype=torch.long)
    return subject_of(
        model, {"input_ids": tokens, "labels": tokens}, H200, loss_func=lambda batch, output: output["loss"],
        optim_func=torch.optim.AdamW, optim_args={"lr": 1e-5, "fused": True}, model_input_format="unpack_dict",
    ).profile  # fmt: skip


@pytest.mark.parametrize(
    ("name", "strategy", "seconds", "memory"),
    [
        ("amp_native bf16", [("amp_native", "bf16")], 0.04, 0.01),
        ("half bf16", [("half", "bf16")], 0.04, 0.01),
        ("amp + checkpoint", [("amp_native", "bf16"), "checkpoint"], 0.05, 0.06),
        ("amp + compile", [("amp_native", "bf16"), "compile"], 0.11, 0.13),
    ],
)
def test_steps(name: str, strategy: list[Any], seconds: float, memory: float) -> None:
    """No constant was fitted to these steps; how compiling is priced was thought over after a look at the last."""
    ms, allocated, _ = MEASURED["steps"][name]
    cost = Strategy.of(strategy).cost(plain_cost(llama(), 4, H200.device.memory_bytes))
    assert step_seconds(cost, H200) == pytest.approx(1e-3 * ms, rel=seconds)
    assert peak_memory(cost).total == pytest.approx(allocated * GIB, rel=memory)


def test_memory_of_scores() -> None:
    """fp32 attention over shared keys writes them out: plain training ran out of memory."""
    gib = H200.device.memory_bytes / GIB
    plain = plain_cost(llama(8), 8, H200.device.memory_bytes)
    assert peak_memory(plain).total / GIB > gib
    fitting = Strategy.of(["module_replace", ("micro_batch", {"size": 4})]).cost(plain)
    _, allocated = MEASURED["eight_rows"]["module_replace, micro_batch 4"]
    assert peak_memory(fitting).total / GIB == pytest.approx(allocated, rel=0.02)


def test_steps_of_eight_rows() -> None:
    """Micro-batches and `chunk`, which no constant was fitted to."""
    ratios = []
    for name, (ms, _) in MEASURED["eight_rows"].items():
        methods = [_METHODS.get(each, each) for each in name.split(", ")]
        if ms is not None:
            cost = Strategy.of(methods).cost(plain_cost(llama(8), 8, H200.device.memory_bytes))
            ratios.append(1e3 * step_seconds(cost, H200) / ms)
    assert len(ratios) == 9
    assert statistics.mean(abs(each - 1.0) for each in ratios) < 0.2
    assert all(0.5 < each < 1.4 for each in ratios)


_METHODS: dict[str, Any] = {
    "amp_native bf16": ("amp_native", "bf16"),
    "checkpoint selective": ("checkpoint", {"selective": True}),
    **{f"micro_batch {size}": ("micro_batch", {"size": size}) for size in (1, 2, 4)},
}
