"""Models of other kinds to plan for: a mixture of experts, an encoder with a decoder, and two that read images.

    atorch plan examples/plan_models.py:mixtral --cluster 8x8xH100-80GB --batch 512
    atorch plan examples/plan_models.py:t5 --cluster 4x8xA100-80GB --batch 1024
    atorch plan examples/plan_models.py:vit --cluster 8xA100-40GB --batch 4096
    atorch plan examples/plan_models.py:resnet --cluster 8xV100-16GB --batch 2048

`plan_llama.py` says what a job is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import console  # noqa: F401  silences transformers' import warnings on machines without CUDA
import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)


def mixtral(seq: int = 4096) -> dict[str, Any]:
    """Mixtral 8x7B, with the dimensions of Jiang et al. 2024, arXiv 2401.04088, table 1."""
    config = MixtralConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    tokens = torch.zeros(1, seq, dtype=torch.long)
    return job_of(lambda: MixtralForCausalLM(config).to(torch.bfloat16), {"input_ids": tokens, "labels": tokens})


def t5(seq: int = 512) -> dict[str, Any]:
    """T5 11B, Raffel et al. 2020, arXiv 1910.10683, section 3.7; labels are a quarter as long."""
    config = T5Config(
        num_layers=24, d_model=1024, d_kv=128, num_heads=128, d_ff=65536, vocab_size=32128, decoder_start_token_id=0
    )
    tokens = torch.zeros(1, seq, dtype=torch.long)
    labels = torch.zeros(1, max(1, seq // 4), dtype=torch.long)
    return job_of(lambda: T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": labels})


def vit() -> dict[str, Any]:
    """ViT-H/14, with the dimensions of Dosovitskiy et al. 2021, arXiv 2010.11929, table 1."""
    config = ViTConfig(
        num_hidden_layers=32,
        hidden_size=1280,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        num_labels=1000,
    )
    return job_of(lambda: ViTForImageClassification(config), images(8))


def resnet() -> dict[str, Any]:
    """ResNet-50, He et al. 2016, arXiv 1512.03385, table 1; batch norm uses all samples of a process."""
    return job_of(lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)), images(8))


def images(count: int) -> dict[str, torch.Tensor]:
    """Samples of ImageNet's size."""
    return {"pixel_values": torch.zeros(count, 3, 224, 224), "labels": torch.zeros(count, dtype=torch.long)}


def job_of(model: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A model of transformers that computes its own loss."""
    return {
        "model": model,
        "sample_batch": batch,
        "model_input_format": "unpack_dict",
        "loss_func": lambda batch, output: output.loss,
        "optim_func": torch.optim.AdamW,
    }
