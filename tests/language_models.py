"""Language models of Hugging Face, in sizes that a test chooses."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn


def llama(
    vocab: int = 64, width: int = 32, inner: int = 48, layers: int = 2, heads: int = 4, kv_heads: int = 2, **more: Any
) -> nn.Module:
    """A Llama without a cache; `more` goes to its config."""
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    config = {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "use_cache": False, **more}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def gpt2(
    vocab: int = 64, width: int = 32, layers: int = 2, heads: int = 4, positions: int = 16, **more: Any
) -> nn.Module:
    """A GPT-2 without a cache; `more` goes to its config."""
    sizes = {"vocab_size": vocab, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": positions}
    config = {**sizes, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, **more}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
