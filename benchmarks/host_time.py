"""Host time of a block, estimated against measured: calls traced × 3 × the result of `launch_seconds`.

Runs forward and backward of blocks so small that only the host's time counts, on a CPU with one thread. The measured
time is the difference between models of ten blocks and of two. On a GPU, each call that starts a kernel takes the host
some microseconds more, in the blocks as in `launch_seconds`.

    python benchmarks/host_time.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row, interleave

from atorch.cluster.microbenchmark import launch_seconds
from atorch.profiler.trace import trace

LOW, HIGH = 0.75, 1.25  # of the measured time of a block
FEW, MANY = 2, 10  # blocks
TOKENS = torch.arange(8).view(1, 8)
IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


class Encoder(nn.Module):
    """torch's own blocks, with a mean as loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.blocks(features).mean(),)


def _language_model(model: str, config: str, **sizes: Any) -> tuple[Callable[[int], nn.Module], Mapping[str, Any]]:
    def make(blocks: int) -> nn.Module:
        described = getattr(transformers, config)(num_hidden_layers=blocks, **sizes)
        made: nn.Module = getattr(transformers, model)(described)
        return made

    return make, {"input_ids": TOKENS, "labels": TOKENS}


def _image_model(blocks: int) -> nn.Module:
    sizes = {name: size for name, size in SMALL.items() if name != "vocab_size"}
    config = transformers.ViTConfig(num_hidden_layers=blocks, image_size=32, patch_size=16, **sizes)
    return transformers.ViTForImageClassification(config)


MODELS: Mapping[str, tuple[Callable[[int], nn.Module], Mapping[str, Any]]] = {
    "Llama": _language_model("LlamaForCausalLM", "LlamaConfig", use_cache=False, **SMALL),
    "GPT-2": _language_model("GPT2LMHeadModel", "GPT2Config", vocab_size=100, n_embd=32, n_head=2, use_cache=False),
    "BERT": _language_model("BertForMaskedLM", "BertConfig", **SMALL),
    "ViT": (_image_model, {"pixel_values": IMAGE, "labels": torch.tensor([0])}),
    "nn.TransformerEncoder": (Encoder, {"features": IMAGE.view(1, 96, 32)[:, :8]}),
}


def _call(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    return model(**batch)


def _loss(_: Any, output: Any) -> Any:
    return output[0]


def _step(model: nn.Module, batch: Mapping[str, Any]) -> None:
    _loss(batch, _call(model, batch)).backward()
    for parameter in model.parameters():
        parameter.grad = None


def measure(quick: bool = False) -> list[Row]:
    """One row for each model."""
    torch.set_num_threads(1)
    rows = []
    for name, (make, batch) in MODELS.items():
        few, many = make(FEW), make(MANY)
        profile = trace(many, batch, _call, _loss)
        calls = sum(segment.count * segment.num_ops for segment in profile.segments if segment.is_block) / MANY
        work = {"few": partial(_step, few, batch), "many": partial(_step, many, batch)}
        probes = []

        def probe(results: list[float] = probes) -> None:
            results.append(launch_seconds(torch.device("cpu")))

        samples = interleave({**work, "probe": probe}, 5 if quick else 100, warmup=5)
        estimated_s = 3.0 * calls * float(np.median(probes)) * (MANY - FEW)
        ratio = samples.interval(
            lambda picked, estimated_s=estimated_s: estimated_s / float(np.median(picked["many"] - picked["few"]))
        )
        block_us = 1e6 * estimated_s / ratio.value / (MANY - FEW)
        rows.append(
            Row(
                f"a block of {name}: host time said, of measured ({calls:.0f} calls, {block_us:.0f} µs)",
                f"{ratio:.2f}",
                f"{LOW}-{HIGH}",
                None if quick else LOW <= ratio.value <= HIGH,
            )
        )
    return rows


if __name__ == "__main__":
    main(measure)
