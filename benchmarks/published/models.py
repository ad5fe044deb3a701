"""Dimensions of public models by name, for blank columns of tables, from the models' published `config.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atorch.cost.transformer import Experts, LatentAttention

_DEEPSEEK_V2 = LatentAttention(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_DEEPSEEK_LITE = LatentAttention(query_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)


def _model(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int, **other: Any
) -> dict[str, Any]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "vocab": vocab,
        "seq_len": seq_len,
        **other,
    }


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _model(layers, hidden, heads, heads, 4 * hidden, 51200, 2048)


_MODELS: Mapping[str, Mapping[str, Any]] = {
    # A pattern of the name in lower case, words joined by "-", first match counts.
    r"llama-?2-7b": _model(32, 4096, 32, 32, 11008, 32000, 4096),
    r"llama-?2-13b": _model(40, 5120, 40, 40, 13824, 32000, 4096),
    r"llama-?2-70b": _model(80, 8192, 64, 8, 28672, 32000, 4096),
    r"llama-?3\.2-1b": _model(16, 2048, 32, 8, 8192, 128256, 8192, tied=True),
    r"llama-?3\.2-3b": _model(28, 3072, 24, 8, 8192, 128256, 8192, tied=True),
    r"llama-?3(\.[0-9])?-8b": _model(32, 4096, 32, 8, 14336, 128256, 8192),
    r"llama-?3(\.[0-9])?-70b": _model(80, 8192, 64, 8, 28672, 128256, 8192),
    r"llama-?3(\.[0-9])?-405b": _model(126, 16384, 128, 8, 53248, 128256, 8192),
    r"llama-?7b": _model(32, 4096, 32, 32, 11008, 32000, 2048),
    r"llama-?13b": _model(40, 5120, 40, 40, 13824, 32000, 2048),
    r"llama-?(30|33)b": _model(60, 6656, 52, 52, 17920, 32000, 2048),
    r"llama-?65b": _model(80, 8192, 64, 64, 22016, 32000, 2048),
    r"mixtral-8x7b": _model(32, 4096, 32, 8, 14336, 32000, 4096, experts=Experts(count=8, top_k=2, ffn=14336)),
    r"mixtral-8x22b": _model(56, 6144, 48, 8, 16384, 32768, 4096, experts=Experts(count=8, top_k=2, ffn=16384)),
    r"mistral-7b": _model(32, 4096, 32, 8, 14336, 32000, 4096),
    r"deepseek-v2-lite": _model(
        27,
        2048,
        16,
        16,
        10944,
        102400,
        4096,
        latent=_DEEPSEEK_LITE,
        experts=Experts(count=64, top_k=6, ffn=1408, shared_ffn=2816, dense_layers=1),
    ),
    r"deepseek-v2": _model(
        60,
        5120,
        128,
        128,
        12288,
        102400,
        4096,
        latent=_DEEPSEEK_V2,
        experts=Experts(count=160, top_k=6, ffn=1536, shared_ffn=3072, dense_layers=1),
    ),
    r"deepseek-(v3|r1)": _model(
        61,
        7168,
        128,
        128,
        18432,
        129280,
        4096,
        latent=_DEEPSEEK_V2,
        experts=Experts(count=256, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    ),
    r"kimi-k2": _model(
        61,
        7168,
        64,
        64,
        18432,
        163840,
        4096,
        latent=_DEEPSEEK_V2,
        experts=Experts(count=384, top_k=8, ffn=2048, shared_ffn=2048, dense_layers=1),
    ),
    r"qwen3-30b-a3b": _model(
        48, 2048, 32, 4, 6144, 151936, 4096, head_dim=128, experts=Experts(count=128, top_k=8, ffn=768)
    ),
    r"qwen3-235b-a22b": _model(
        94, 4096, 64, 4, 12288, 151936, 4096, head_dim=128, experts=Experts(count=128, top_k=8, ffn=1536)
    ),
    r"qwen2-57b-a14b": _model(
        28, 3584, 28, 4, 18944, 151936, 4096, experts=Experts(count=64, top_k=8, ffn=2560, shared_ffn=20480)
    ),
    r"dbrx": _model(40, 6144, 48, 8, 10752, 100352, 4096, experts=Experts(count=16, top_k=4, ffn=10752)),
    r"llama-?4-scout": _model(
        48,
        5120,
        40,
        8,
        16384,
        202048,
        8192,
        head_dim=128,
        experts=Experts(count=16, top_k=1, ffn=8192, shared_ffn=8192),
    ),
    r"gpt-?oss-20b": _model(
        24, 2880, 64, 8, 2880, 201088, 4096, head_dim=64, experts=Experts(count=32, top_k=4, ffn=2880)
    ),
    r"gpt-?oss-120b": _model(
        36, 2880, 64, 8, 2880, 201088, 4096, head_dim=64, experts=Experts(count=128, top_k=4, ffn=2880)
    ),
    r"codellama-34b": _model(48, 8192, 64, 8, 22016, 32000, 16384),
    r"yi-6b": _model(32, 4096, 32, 4, 11008, 64000, 4096),
    r"yi-34b": _model(60, 7168, 56, 8, 20480, 64000, 4096),
    r"tinyllama": _model(22, 2048, 32, 4, 5632, 32000, 2048),
    r"baichuan-?2?-7b": _model(32, 4096, 32, 32, 11008, 125696, 4096),
    r"baichuan-?2?-13b": _model(40, 5120, 40, 40, 13696, 125696, 4096),
    r"qwen2\.5-14b": _model(48, 5120, 40, 8, 13824, 152064, 4096),
    r"qwen2\.5-7b|qwen2-7b": _model(28, 3584, 28, 4, 18944, 152064, 4096),
    r"qwen2\.5-32b": _model(64, 5120, 40, 8, 27648, 152064, 4096),
    r"qwen2(\.5)?-72b": _model(80, 8192, 64, 8, 29568, 152064, 4096),
    r"qwen3-8b": _model(36, 4096, 32, 8, 12288, 151936, 4096, head_dim=128),
    r"qwen3-32b": _model(64, 5120, 64, 8, 25600, 151936, 4096, head_dim=128),
    r"internlm-7b": _model(32, 4096, 32, 32, 11008, 103168, 2048),
    r"internlm-20b": _model(60, 5120, 40, 40, 13824, 103168, 2048),
    # Brown et al. 2020, arXiv 2005.14165, table 2.1, with the vocabulary as Megatron pads it.
    r"gpt-?3?-(125m|small)": _gpt(12, 768, 12),
    r"gpt-?3?-(350m|345m|medium)": _gpt(24, 1024, 16),
    r"gpt-?3?-(760m|large)": _gpt(24, 1536, 16),
    r"gpt-?3?-(1\.3b|xl)": _gpt(24, 2048, 16),
    r"gpt-?3?-2\.7b": _gpt(32, 2560, 32),
    r"gpt-?3?-6\.7b": _gpt(32, 4096, 32),
    r"gpt-?3?-13b": _gpt(40, 5120, 40),
    r"gpt-?3?-175b": _gpt(96, 12288, 96),
    # Narayanan et al. 2021, arXiv 2104.04473, table 1.
    r"gpt-?3?-1\.7b": _gpt(24, 2304, 24),
    r"gpt-?3?-3\.6b": _gpt(30, 3072, 32),
    r"gpt-?3?-7\.5b": _gpt(36, 4096, 32),
    r"gpt-?3?-18(\.4)?b": _gpt(40, 6144, 48),
    r"gpt-?3?-22b": _gpt(48, 6144, 64),
    r"gpt-?3?-39(\.1)?b": _gpt(48, 8192, 64),
    r"gpt-?3?-76(\.1)?b": _gpt(60, 10240, 80),
    r"gpt-?3?-145(\.6)?b": _gpt(80, 12288, 96),
    r"gpt-?3?-310(\.1)?b": _gpt(96, 16384, 128),
    r"gpt-?3?-530b|mt-nlg": _gpt(105, 20480, 128),
    r"gpt-?3?-1t\b|gpt-?3?-1008b": _gpt(128, 25600, 160),
    r"gpt-?2-xl|gpt-?2-1\.5b": _model(48, 1600, 25, 25, 6400, 50257, 1024),
    r"gpt-?2-large|gpt-?2-774m": _model(36, 1280, 20, 20, 5120, 50257, 1024),
    r"gpt-?2-medium|gpt-?2-355m": _model(24, 1024, 16, 16, 4096, 50257, 1024),
    r"gpt-?2(-small|-124m|-117m)?$": _model(12, 768, 12, 12, 3072, 50257, 1024),
    r"gpt-?neox-20b": _model(44, 6144, 64, 64, 24576, 50432, 2048, tied=False, learned_positions=False),
    r"opt-1\.3b": _model(24, 2048, 32, 32, 8192, 50272, 2048),
    r"opt-2\.7b": _model(32, 2560, 32, 32, 10240, 50272, 2048),
    r"opt-6\.7b": _model(32, 4096, 32, 32, 16384, 50272, 2048),
    r"opt-13b": _model(40, 5120, 40, 40, 20480, 50272, 2048),
    r"opt-30b": _model(48, 7168, 56, 56, 28672, 50272, 2048),
    r"opt-66b": _model(64, 9216, 72, 72, 36864, 50272, 2048),
    r"opt-175b": _model(96, 12288, 96, 96, 49152, 50272, 2048),
    r"bloom-7b1": _model(30, 4096, 32, 32, 16384, 250880, 2048),
    r"bloom-176b|bloom$": _model(70, 14336, 112, 112, 57344, 250880, 2048),
    r"bert-large": _model(24, 1024, 16, 16, 4096, 30522, 512),
    r"bert-base": _model(12, 768, 12, 12, 3072, 30522, 512),
    r"mpt-125m": _model(12, 768, 12, 12, 3072, 50368, 2048),
    r"mpt-350m": _model(24, 1024, 16, 16, 4096, 50368, 2048),
    r"mpt-760m": _model(24, 1536, 12, 12, 6144, 50368, 2048),
    r"mpt-1b": _model(24, 2048, 16, 16, 8192, 50368, 2048),
    r"mpt-3b": _model(32, 2560, 20, 20, 10240, 50368, 2048),
    r"mpt-7b": _model(32, 4096, 32, 32, 16384, 50368, 2048),
    r"mpt-13b": _model(40, 5120, 40, 40, 20480, 50368, 2048),
    r"mpt-30b": _model(48, 7168, 56, 56, 28672, 50368, 8192),
    r"mpt-70b": _model(80, 8192, 64, 64, 32768, 50368, 2048),
}


def known_dimensions(model: str) -> Mapping[str, Any]:
    """Dimensions of the model with this name, by the fields of `TransformerShape`; empty if unknown."""
    name = re.sub(r"[\s_/()-]+", "-", model.lower()).strip("-")
    return next((found for pattern, found in _MODELS.items() if re.search(pattern, name)), {})
