"""The shape of a run's model: from its row, then from the named model's dimensions, then from the usual ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from atorch.cost.transformer import Experts, TransformerShape, transformer_profile
from atorch.errors import ArgumentError
from benchmarks.published.layout import framework_for
from benchmarks.published.models import known_dimensions
from benchmarks.published.table import Row

_DIMENSIONS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")
_HEAD = 128  # default features of a head
_MIXTURE = re.compile(
    r"moe|mixture of experts|\ba\d+(\.\d+)?b\b|dbrx|grok|kimi|maverick|scout|gpt-?oss|jamba|minimax|arctic"
)
_GPT = ("gpt", "nlg", "gelu", "mpt", "bloom", "opt-", "bert", "falcon", "pythia", "neox")


def shape_of(row: Row) -> TransformerShape:
    """The model's shape.

    Raises:
        ArgumentError: a dimension is missing, and neither the name nor the number of parameters determines it.
    """
    known = dict(known_dimensions(row.given["model"]))
    _reduce(known, row.number("layers"))
    if tokens := _searched_with(row):
        known["seq_len"] = tokens
    known |= {name: int(value) for name in _DIMENSIONS if (value := row.number(name))}
    missing = [name for name in ("layers", "hidden", "seq_len") if not known.get(name)]
    if missing:
        raise ArgumentError(f"{', '.join(missing)} of model {row.given['model']!r} not given, and it is not known")
    known.setdefault("heads", _heads_of(known["hidden"]))
    known.setdefault("kv_heads", known["heads"])
    for narrow, wide in (("heads", "hidden"), ("kv_heads", "heads")):
        if known[wide] < known[narrow]:
            raise ArgumentError(f"{wide} is {known[wide]}, which is less than {narrow}, {known[narrow]}")
    style = _style(row)
    known.setdefault("head_dim", known["hidden"] // known["heads"])
    known.setdefault("ffn", round(known["hidden"] * 8 / 3) if style["gated"] else 4 * known["hidden"])
    if "experts" not in known:
        known["experts"] = _experts(row, known["ffn"])
    style = {**style, **known}
    if not known.get("vocab"):
        style["vocab"] = _vocab(row, TransformerShape(**{**style, "vocab": 0}))
    if style.get("latent") is not None and "mla" not in row.text("arch") and row.text("arch"):
        style["latent"] = None
    return TransformerShape(**style)


def _searched_with(row: Row) -> int:
    """Tokens of a sample in a framework's own search, whose rows have its method names as precision; else 0."""
    by_search = row.text("precision") in ("amp_native", "amp_apex", "half", "notchosen")
    return framework_for(row).search_tokens if by_search else 0


def _heads_of(hidden: int) -> int:
    """Number of heads that divides `hidden`, with features a head nearest to the default."""
    return min((heads for heads in range(1, hidden + 1) if hidden % heads == 0), key=lambda n: abs(hidden / n - _HEAD))


def _reduce(known: dict[str, Any], layers: float | None) -> None:
    """Scale the number of dense layers if a run has fewer layers; at least one stays."""
    experts = known.get("experts")
    if layers and experts is not None and experts.dense_layers and layers < known["layers"]:
        dense = max(1, round(experts.dense_layers * layers / known["layers"]))
        known["experts"] = replace(experts, dense_layers=dense)


def _experts(row: Row, ffn: int) -> Experts | None:
    """Experts from words such as "8 experts top-2" or "8x7B", each with feed-forward width `ffn`."""
    words = f"{row.text('arch')} {row.text('model')}"
    count = re.search(r"\b(\d+)[ -]*experts?\b|\b(\d+)x\d+(?:\.\d+)?b\b", words)
    if count is None:
        if _MIXTURE.search(words) or (row.number("ep") or 1) > 1:
            raise ArgumentError(
                f"how many experts model {row.given['model']!r} has is not known; arch says it as '8 experts top-2'"
            )
        return None
    chosen = re.search(r"top[-_ =]*k?[-_ =]*(\d+)", words)
    found = Experts(count=int(count[1] or count[2]), top_k=int(chosen[1]) if chosen else 2, ffn=ffn)
    if not 1 <= found.top_k <= found.count <= 4096:
        raise ArgumentError(f"arch says {found.top_k} of {found.count} experts; it is at least 1 of at most 4096")
    return found


def _style(row: Row) -> dict[str, Any]:
    """Kind of block from the architecture's words."""
    words = f"{row.text('arch')} {row.text('model')}"
    is_gpt = any(word in words for word in _GPT)
    gated = any(word in words for word in ("swiglu", "geglu", "gated")) or not is_gpt
    tied = re.search(r"tie\w*[ _]emb\w*(?:=(\w+))?", words)
    return {
        "gated": gated,
        "tied": (tied[1] or "true") == "true" if tied else is_gpt,
        "norm": "rmsnorm" if gated else "layernorm",
        "learned_positions": is_gpt and not any(word in words for word in ("rope", "rotary", "alibi", "bloom")),
        "bias": is_gpt and "no bias" not in words,
    }


def _vocab(row: Row, without: TransformerShape) -> int:
    """Vocabulary from the parameters that are left for the embedding."""
    total = row.number("params_b")
    if total is None:
        raise ArgumentError(f"vocab of model {row.given['model']!r} is not given, nor are params_b to tell it from")
    rest = 1e9 * total - transformer_profile(without).num_params
    return min(2**23, max(1024, round(rest / without.hidden / (1 if without.tied else 2))))
