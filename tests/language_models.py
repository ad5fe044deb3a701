"""Models of Hugging Face, in sizes that a test chooses; `more` goes to the config. None drops out or has a cache."""

from typing import Any

import transformers
from torch import nn


def llama(
    vocab: int = 64, width: int = 32, inner: int = 48, layers: int = 2, heads: int = 4, kv_heads: int = 2, **more: Any
) -> nn.Module:
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    config = {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "use_cache": False, **more}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def gpt2(
    vocab: int = 64, width: int = 32, layers: int = 2, heads: int = 4, positions: int = 16, **more: Any
) -> nn.Module:
    sizes = {"vocab_size": vocab, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": positions}
    config = {**sizes, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, **more}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def bert(
    vocab: int = 64, width: int = 32, inner: int = 48, layers: int = 2, heads: int = 4, positions: int = 16, **more: Any
) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {**sizes, "vocab_size": vocab, "num_attention_heads": heads, "max_position_embeddings": positions}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**config, **rates, **more}))


def t5(vocab: int = 64, width: int = 32, inner: int = 48, layers: int = 2, heads: int = 4, **more: Any) -> nn.Module:
    """`layers` layers before as many more that attend to them."""
    sizes = {"vocab_size": vocab, "d_model": width, "d_ff": inner, "d_kv": width // heads}
    config = {**sizes, "num_layers": layers, "num_heads": heads, "dropout_rate": 0.0, "use_cache": False, **more}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **config))


def vit(
    width: int = 32, inner: int = 48, layers: int = 2, heads: int = 4, image: int = 8, patch: int = 4, **more: Any
) -> nn.Module:
    """A classifier of images, without a vocabulary."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {**sizes, "num_attention_heads": heads, "image_size": image, "patch_size": patch}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**config, **rates, **more}))


def mixtral(
    vocab: int = 64, width: int = 32, inner: int = 48, layers: int = 2, heads: int = 4, kv_heads: int = 2, **more: Any
) -> nn.Module:
    """Four experts, two of them for a token."""
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    config = {**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_local_experts": 4, **more}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(use_cache=False, **config))
