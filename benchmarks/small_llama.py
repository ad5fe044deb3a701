"""A Llama with grouped keys and values, small enough to make the cost of the code around it visible."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB, SEQ = 1024, 128


def make_model(width: int, layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_tokens(rows: int, length: int = SEQ) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
