"""Bytes, seconds and counts as people read them."""

from __future__ import annotations

KiB = 1024
MiB = 1024**2
GiB = 1024**3


def format_bytes(num_bytes: float) -> str:
    """`1.5 GiB`: three significant figures in the largest binary unit that keeps the number at least 1."""
    for unit, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3g} {unit}" if abs(num_bytes) < 1000 * size else f"{num_bytes / size:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`12.3 ms`, `4.2 s`, `3 min 20 s`."""
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs"


def format_count(number: float) -> str:
    """`7.5B`, `110M`, `1.2K`: a count of parameters or tokens."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
