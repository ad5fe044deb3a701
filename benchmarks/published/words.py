"""Words of a recipe: the attention kernel, the recomputation, the number formats, and the trained parameters.

An unknown word is refused, never replaced by the usual choice: a recipe that does something else than is estimated says
nothing about the estimate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from atorch.errors import ArgumentError
from benchmarks.published.table import BLANK, UNKNOWN, Row

Kernel = Literal["flash1", "flash2", "flash3", "triton", "cudnn", "efficient", "fused_softmax", "eager"]
"""Kernels of attention; only the last two write their scores to memory."""
WRITES_SCORES = ("fused_softmax", "eager")

_KERNELS: Mapping[str, Kernel] = {
    # Patterns of the words; the first match counts.
    r"(flash\w*[-_ ]*(att\w*)?|\bfa)[-_ ]*v?3": "flash3",
    r"(flash\w*[-_ ]*(att\w*)?|\bfa)[-_ ]*v?2": "flash2",
    r"(flash\w*[-_ ]*(att\w*)?|\bfa)[-_ ]*v?1": "flash1",
    r"cudnn|fused ?attention": "cudnn",
    # MPT's benchmarks ran with attn_impl triton, the default of mosaicml/llm-foundry until March 2024 in
    # scripts/train/benchmarking/submit_benchmarks.py. FlexAttention is generated Triton.
    r"triton|flex": "triton",
    r"xformers|efficient": "efficient",
    r"unfused/megatron|megatron.*softmax|fused (mha/)?softmax": "fused_softmax",
    r"unfused|\beager\b|\bmath\b|\bnaive\b|^notchosen$|softmax": "eager",
    r"flash|sdpa|scaled.dot|module_replace|^(true|yes|on)$": "flash2",
}
_TRANSFORMER_ENGINE = re.compile(r"\bte\b|transformer.?engine")
_HOPPER_ON = re.compile(r"h100|h200|h800|h20\b|b200|b300|gh200")
_WITHOUT_FLASH = re.compile(r"v100|p100|\bt4\b")


def attention_of(row: Row) -> Kernel:
    """The kernel of attention; by default FlashAttention-2 if the device supports it.

    Transformer Engine takes cuDNN's kernel on Hopper and later, FlashAttention-2 before (`get_attention_backend` in its
    `pytorch/attention`).

    Raises:
        ArgumentError: the words name no known kernel.
    """
    words = row.text("attn")
    if words in UNKNOWN:
        return "eager" if _WITHOUT_FLASH.search(row.text("hardware")) else "flash2"
    if _TRANSFORMER_ENGINE.search(words):
        return "cudnn" if _HOPPER_ON.search(row.text("hardware")) else "flash2"
    found = next((kernel for pattern, kernel in _KERNELS.items() if re.search(pattern, words)), None)
    if found is None:
        raise ArgumentError(f"attn is {words!r}; known are FlashAttention 1 to 3, SDPA, TE, cuDNN, Triton, eager, …")
    return found


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Parts of the forward pass that run again in backward.

    `blocks` are recomputed whole, `share` of them; `attention` is Megatron's selective recomputation, of attention's
    core (arXiv 2205.05198, section 5); `products` is torchtitan's: all of a block but every second product and
    attention (`torchtitan/distributed/activation_checkpoint.py`).
    """

    what: Literal["nothing", "blocks", "attention", "products"] = "nothing"
    share: float = 1.0


def recomputation_of(row: Row) -> Recomputation:
    """The recomputation of the recipe.

    Raises:
        ArgumentError: the words are unknown.
    """
    whole = row.text("ckpt")
    if whole in BLANK:
        return Recomputation()
    every = re.search(r"every (\d+)|1 (?:of|in) (\d+)|selective\W*(\d+)\W*$", whole)
    if every:
        return Recomputation("blocks", 1.0 / max(1, int(next(filter(None, every.groups())))))
    if re.fullmatch(r"selective\W*(layer|block)s?\W*", whole):
        return Recomputation("blocks", 0.5)  # every other one, torchtitan's default
    if re.fullmatch(r"(selective|per)?\W*op(erator)?s?(-?wise)?\W*(sac|selective)?", whole):
        return Recomputation("products")
    words = re.sub(r"\(.*?\)", "", whole).strip()
    if words in ("selective", "selective recompute", "sac") and words == whole:
        # Its recipes set selective_ac_option to "op".
        return Recomputation("products" if "torchtitan" in row.text("framework") else "attention")
    if re.fullmatch(r"(selective)?\W*(core|attention|core[-_ ]att\w*|attention[-_ ]only|attn)\W*", whole):
        return Recomputation("attention")
    if words in ("full", "true", "yes", "on", "1", "1.0", "all", "whole", "uniform", "blocks", "block", "layer"):
        return Recomputation("blocks")
    raise ArgumentError(
        f"ckpt is {whole!r}; known are none, full, every n, selective (n), selective (op) and selective (attention)"
    )


Scaling = Literal["", "delayed", "tensorwise", "rowwise", "rowwise_gw_hp", "blockwise", "mx"]
"""The part of an fp8 tensor that shares a scale. "delayed" scales are of earlier steps, "gw_hp" leaves weights'
gradients in 16 bits, and "mx" is 32 neighbours, by the OCP's microscaling formats."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The number format of matrix products, and its mix with others."""

    dtype: Literal["float32", "tfloat32", "float16", "bfloat16", "float8"]
    scaling: Scaling = ""
    gathers_float8: bool = False  # sharded weights are cast before they are gathered
    reduces_16_bits: bool = False  # gradients are sent as they are computed

    @property
    def is_mixed(self) -> bool:
        """True if anything is computed in less than 32 bits."""
        return self.dtype not in ("float32", "tfloat32")


_FORMAT = re.compile(r"[a-z]*?(?:fp|float|bf|tf|int|nf)\d+|\d+bit")
_FORMATS = (
    "fp8",
    "fp16",
    "fp32",
    "float8",
    "float16",
    "float32",
    "bf16",
    "bfloat16",
    "tf32",
    "tfloat32",
    "mxfp8",
    "16bit",
)
_NO_FORMAT = ("amp", "mixed", "see scripts", "native", "o1", "o2", "auto", *UNKNOWN, "no", "notchosen", "false")


def precision_of(row: Row) -> Precision:
    """The precision of the recipe; an unnamed mix is bf16, or fp16 on devices without bf16.

    Raises:
        ArgumentError: a number format is unknown, or none is named.
    """
    words = row.text("precision")
    if adapter_of(row):  # adapters compute in 16 bits, whatever the format of frozen weights
        words = re.sub(r"nf4|int4|4-?bit", "", words).strip(" +,/")
    written = re.findall(r"[a-z0-9]+", words.replace("-bit", "bit"))
    formats = [found[0] for word in written if (found := _FORMAT.match(word))]
    strange = [found for found in formats if found not in _FORMATS]
    if strange:
        raise ArgumentError(f"precision is {words!r}; of {strange[0]} nothing is known")
    if re.search(r"fp8|float8|rowwise|tensorwise", words):
        gathers = bool(re.search(r"(float8|fp8|f8) all-?gather", f"{words} {row.text('fsdp')}"))
        return Precision("float8", _scaling(words), gathers)
    pure = "pure" in words
    if re.search(r"bf16|bfloat16", words):
        return Precision("bfloat16", reduces_16_bits=pure)
    if re.search(r"fp16|float16|half|16-?bit", words):
        return Precision("float16", reduces_16_bits=pure)
    if "32" in words or words in ("none", "no", "notchosen", "false"):
        return Precision("tfloat32" if "tf32" in words or "tfloat32" in words else "float32")
    if words and not any(word and word in words for word in _NO_FORMAT):
        raise ArgumentError(f"precision is {words!r}; known are fp32, tf32, fp16, bf16 and fp8, alone or mixed")
    return Precision("float16" if _WITHOUT_FLASH.search(row.text("hardware")) else "bfloat16")


_SCALINGS: Mapping[str, Scaling] = {
    # Two letters are those of NVIDIA's recipes: current, delayed, sub-channel, microscaling.
    r"mxfp8|fp8[-_ ]mx\b": "mx",
    r"row-?wise_with_gw_hp|gw_hp": "rowwise_gw_hp",
    r"row-?wise": "rowwise",
    r"block|fp8[-_ ]sc\b": "blockwise",
    r"delayed|fp8[-_ ]ds\b": "delayed",
}


def _scaling(words: str) -> Scaling:
    """The scaling in a recipe's words; tensorwise by default."""
    for pattern, found in _SCALINGS.items():
        if re.search(pattern, words):
            return found
    return "tensorwise"


_ADAPTERS = re.compile(r"\b(q?lora|dora|qalora|loftq|ia3|adapters?|peft|frozen|prefix[- ]tuning)\b")


def adapter_of(row: Row) -> str:
    """The recipe's word for its adapters; "" if all parameters train."""
    if row.text("adapters") not in BLANK:
        return row.text("adapters")
    columns = ("model", "arch", "framework", "precision", "fsdp", "ckpt")
    found = _ADAPTERS.search(" ".join(row.text(name) for name in columns))
    return found[0] if found else ""
