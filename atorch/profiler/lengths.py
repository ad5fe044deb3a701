"""Profiles of long samples, extrapolated from short ones.

A model that goes through its tokens in a Python loop takes minutes to trace at full length. Figures of products grow
with the tokens, those of attention with their square: three short samples determine every figure, and a fourth tells
whether they do. What works chunk by chunk is a polynomial in whole chunks, so larger units are tried where smaller fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from atorch.cost import ModelProfile

UNITS = (8, 64, 256)  # tokens; the last two are usual chunks
TIMES = (1, 2, 3)
CHECK = 9  # times the unit: in another chunk of the next unit
_TOLERANCE = 0.02


class _UnlikeError(Exception):
    """Profiles that differ in more than figures."""


def extrapolated(profile_of: Callable[[int], ModelProfile], length: int) -> ModelProfile | None:
    """The profile of a sample of `length` tokens; None where short samples do not foretell it.

    Args:
        profile_of: traces a sample of so many tokens.
    """
    for unit in UNITS:
        if CHECK * unit >= length:
            return None
        sizes = [unit * times for times in TIMES]
        short = [profile_of(size) for size in sizes]
        check = profile_of(CHECK * unit)
        try:
            if _is_near(_at(CHECK * unit, sizes, short), check):
                found: ModelProfile = _at(length, [*sizes[1:], CHECK * unit], [*short[1:], check])
                return found
        except _UnlikeError:
            continue
    return None


def _at(length: int, sizes: Sequence[int], known: Sequence[Any]) -> Any:
    """What lies at `length` on the parabola through what is known at three sizes (Lagrange's formula)."""
    first = known[0]
    if any(type(each) is not type(first) for each in known):
        raise _UnlikeError
    if is_dataclass(first):
        names = [each.name for each in fields(first)]
        return replace(
            first, **{name: _at(length, sizes, [getattr(each, name) for each in known]) for name in names}
        )
    if isinstance(first, tuple):
        if len({len(each) for each in known}) > 1:
            raise _UnlikeError
        return tuple(_at(length, sizes, each) for each in zip(*known, strict=True))
    if all(each == first for each in known):
        return first
    if not isinstance(first, (int, float)) or isinstance(first, bool):
        raise _UnlikeError
    weights = (_weight(length, each, [other for other in sizes if other != each]) for each in sizes)
    found = sum(weight * float(each) for weight, each in zip(weights, known, strict=True))
    return type(first)(round(found) if isinstance(first, int) else max(0.0, found))


def _weight(length: int, size: int, others: Sequence[int]) -> float:
    product = 1.0
    for other in others:
        product *= (length - other) / (size - other)
    return product


def _is_near(foretold: ModelProfile, seen: ModelProfile) -> bool:
    names = ("matmul_flops", "attention_flops", "traffic_bytes", "num_ops", "activation_bytes")
    return all(
        abs(getattr(foretold, name) - getattr(seen, name)) <= _TOLERANCE * max(1.0, getattr(seen, name)) for name in names
    )
