"""Llamas to plan for, from 8 to 405 billion parameters, on clusters that you need not have:

    atorch plan examples/plan_llama.py:job --cluster 16x8xH100-80GB --batch 1024
    atorch plan examples/plan_llama.py:llama_405b --cluster 128x8xH100-80GB --batch 1024 --html plan.html

A job is a function that returns the arguments of `atorch.plan`. The model is given as a function that makes it. That
runs on the meta device and takes no memory. Nothing is downloaded and nothing is trained.
"""

from __future__ import annotations

from typing import Any

import console  # noqa: F401  silences transformers' import warnings on machines without CUDA
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def job(seq: int = 8192) -> dict[str, Any]:
    """Llama 3 70B; the dimensions are those of Grattafiori et al. 2024, arXiv 2407.21783, table 3."""
    return causal_lm(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, seq=seq)


def llama_8b(seq: int = 8192) -> dict[str, Any]:
    """Llama 3 8B."""
    return causal_lm(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, seq=seq)


def llama_405b(seq: int = 8192) -> dict[str, Any]:
    """Llama 3.1 405B."""
    return causal_lm(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, seq=seq)


def causal_lm(*, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, seq: int) -> dict[str, Any]:
    """A Llama of this shape that learns to predict the next token."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=128256,
        max_position_embeddings=seq,
        use_cache=False,
    )
    tokens = torch.zeros(1, seq, dtype=torch.long)
    return {
        "model": lambda: LlamaForCausalLM(config),
        "sample_batch": {"input_ids": tokens, "labels": tokens},
        "model_input_format": "unpack_dict",
        "loss_func": lambda batch, output: output.loss,
        "optim_func": torch.optim.AdamW,
    }
