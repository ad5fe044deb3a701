"""Adapters that a recipe trains in place of a model's parameters, in the planner's terms."""

from __future__ import annotations

import re

from atorch.cost.adapted_profile import ALL_LINEAR, NF4_ITEMSIZE, Adapters
from atorch.errors import ArgumentError
from benchmarks.published.frameworks import Framework
from benchmarks.published.table import Row
from benchmarks.published.words import adapter_of

RANK = 8  # peft's default, src/peft/tuners/lora/config.py
QLORA_RANK = 64  # arXiv 2305.14314, appendix B.2, beside every linear layer
_PEFT = re.compile(r"peft|transformers|trl|axolotl|llama-?factory|unsloth|hugging|atorch")
_QUANTIZED = re.compile(r"qlora|nf4|4-?bit|int4")
_EVERYWHERE = re.compile(r"all[-_ ]?linear|all layers|qkv ?o?\W*mlp|q,k,v,o")


def adapters_of(row: Row, framework: Framework) -> Adapters | None:
    """The recipe's adapters, from the words of its columns; None if all parameters train.

    By default rank and targets are the usual ones: queries and values in peft, every linear layer in QLoRA. peft casts
    inputs of an adapter to the adapter's fp32 (`_cast_input_dtype`,
    src/peft/tuners/tuners_utils.py), so that each keeps its own copy.

    Raises:
        ArgumentError: the recipe trains a part of the model in an unknown way.
    """
    kind = adapter_of(row)
    if not kind:
        return None
    words = " ".join(row.text(name) for name in ("adapters", "model", "arch", "framework", "precision"))
    if not re.search(r"lora|dora|peft", words):
        raise ArgumentError(f"{kind!r} trains a part of the model; known are LoRA, QLoRA and DoRA")
    is_quantized = bool(_QUANTIZED.search(words))
    rank = re.search(r"\b(?:r|rank)\W{0,2}(\d+)", words)
    everywhere = is_quantized or bool(_EVERYWHERE.search(words))
    return Adapters(
        rank=int(rank[1]) if rank else QLORA_RANK if is_quantized else RANK,
        targets=ALL_LINEAR if everywhere else frozenset(("query", "value")),
        base_itemsize=2.0 if is_quantized else framework.frozen_itemsize,
        quantized_itemsize=NF4_ITEMSIZE if is_quantized else 0.0,
        apart_itemsize=4.0 if _PEFT.search(f"{words} {row.text('framework')}") else 0.0,
        magnitudes="dora" in words,
    )
