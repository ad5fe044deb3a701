"""Human-readable bytes, seconds and counts: three digits in the largest unit with a number of at least 1."""

from __future__ import annotations

from collections.abc import Sequence

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


def _scaled(number: float, units: Units) -> str:
    # 0.9995 of a unit rounds to 1 of it.
    suffix, size = next((unit for unit in units if abs(number) >= 0.9995 * unit[1]), units[-1])
    value = number / size
    return (f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}") + suffix
