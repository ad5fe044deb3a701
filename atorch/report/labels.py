"""Meanings of the short names in a plan: categories of bytes and seconds, and reasons for rejection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

CATEGORIES: Mapping[str, str] = {
    "masters": "fp32 copies of 16-bit parameters",
    "transient": "gathered parameters, whole gradients, what the optimizer's step needs",
    "working": "what one operation needs beside what is saved",
    "matmul": "products and attention",
    "traffic": "operations that only move bytes, such as norms",
    "launch": "waiting for operations to be launched",
    "bubble": "stages of a pipeline waiting",
    "exposed_comm": "communication that computing does not hide, and copies for it",
    "offload": "waiting for host memory",
}
"""Meanings of categories of memory and time, without self-explanatory ones such as gradients."""

WORK: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
    "traffic": "memory traffic",
    "launches": "launches",
    "splits": "what splits of the model send",
    "sharding": "what shared parameters and gradients send",
    "pipeline": "the pipeline's waiting and sends",
    "host": "host memory",
    "common": "what all steps share",
}
"""Kinds of work by which estimates are uncertain."""

_WHY: Mapping[str, str] = {
    "memory": "out of memory",
    "hardware": "not on this hardware",
    "refused": "cannot be applied",
    "time": "out of time",
}


def shown_name(category: str) -> str:
    return category.replace("_", " ")


def shown_work(kind: str) -> str:
    return WORK.get(kind, kind)


def legend(categories: Iterable[str]) -> str:
    """Meanings of the categories that are not self-explanatory, in one line; "" if all are."""
    meanings = [(shown_name(name), CATEGORIES[name]) for name in dict.fromkeys(categories) if name in CATEGORIES]
    return "; ".join(f"{name}: {meaning}" for name, meaning in meanings)


def why_not(why: str) -> str:
    """The reason against a composition, in words: `out of memory`."""
    return _WHY.get(why, why)


def left_out(rejected: Iterable[Mapping[str, Any]]) -> str:
    """The number left out and the reasons: `12 more: 7 out of memory, 5 slower`; "" for none."""
    counts = Counter(why_not(entry["why"]) for entry in rejected)
    reasons = ", ".join(f"{number:,} {why}" for why, number in counts.most_common())
    return f"{counts.total():,} more: {reasons}" if counts else ""
