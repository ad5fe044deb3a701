"""Human-readable bytes, seconds and counts: three digits in the largest unit with a number of at least 1.

Durations and amounts are also read from text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

KiB = 1024
MiB = 1024**2
GiB = 1024**3

Units = Sequence[tuple[str, float]]  # (suffix, size), the largest first


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`."""
    return _scaled(num_bytes, ((" GiB", GiB), (" MiB", MiB), (" KiB", KiB), (" B", 1)))


def format_seconds(seconds: float) -> str:
    """`12.3 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 59.95:
        return _scaled(seconds, ((" s", 1.0), (" ms", 1e-3), (" µs", 1e-6))) if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def format_count(number: float) -> str:
    """`7.5B`, `110M`, `1.2K`: a count of parameters or tokens."""
    return _scaled(number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3), ("", 1)))


def plural(number: int, noun: str) -> str:
    """`1 sample`, `1,024 samples`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _scaled(number: float, units: Units) -> str:
    # 0.9995 of a unit rounds to 1 of it.
    suffix, size = next((unit for unit in units if abs(number) >= 0.9995 * unit[1]), units[-1])
    value = number / size
    return (f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}") + suffix


_SECONDS: Mapping[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SCALES: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?(?:e\d{1,3})?)\s*([a-z]*)\s*([a-z]*)", re.IGNORECASE)


def seconds_in(text: str) -> float | None:
    """The seconds of `500ms`, `2s`, `10 min`, `3h` or `1.5d`; None for other text."""
    found = _AMOUNT.fullmatch(text.strip())
    unit = _SECONDS.get(found[2].lower()) if found and not found[3] else None
    return None if found is None or unit is None else float(found[1]) * unit


def amount_in(text: str) -> tuple[float, str] | None:
    """The number and the unit of `15T`, `300B tokens`, `1e12` or `2000 steps`; None for other text."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return None
    scale, unit = found[2].lower(), found[3].lower()
    if scale not in _SCALES:
        scale, unit = "", f"{scale} {unit}".strip()
    return float(found[1]) * _SCALES[scale], unit
