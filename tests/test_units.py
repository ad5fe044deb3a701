"""Numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch.units import GiB, KiB, MiB, amount_in, format_bytes, format_count, format_seconds, seconds_in


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (KiB, "1 KiB"),
        (1536, "1.5 KiB"),
        (MiB - 1, "1 MiB"),
        (999.6 * KiB, "1,000 KiB"),
        (1.5 * GiB, "1.5 GiB"),
        (141 * GiB, "141 GiB"),
        (12_345 * GiB, "12,345 GiB"),
        (-2 * MiB, "-2 MiB"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "0.0025 µs"),
        (4.2e-6, "4.2 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (4.2, "4.2 s"),
        (59.96, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7_199.9, "2 h 0 min"),
        (3 * 3600 + 125, "3 h 2 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1_200, "1.2K"), (110e6, "110M"), (999_999, "1M"), (7.5e9, "7.5B"), (1.8e12, "1.8T")],
)
def test_counts(number: float, text: str) -> None:
    assert format_count(number) == text


@given(st.floats(1.0, 1e14))
def test_nothing_is_shown_in_scientific_notation(number: float) -> None:
    for text in (format_bytes(number), format_seconds(number), format_seconds(number * 1e-9), format_count(number)):
        assert "e" not in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2.0), ("500 ms", 0.5), ("1.5h", 5400.0), ("1e3min", 60000.0), ("3d", 259200.0)]
    + [(text, None) for text in ("2", "s", "-2s", "2 weeks", "2s 3s", "", "nan s", "inf")],
)
def test_seconds_are_read(text: str, seconds: float | None) -> None:
    assert seconds_in(text) == seconds


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("15T", (15e12, "")),
        ("1.5e12", (1.5e12, "")),
        ("300b tokens", (3e11, "tokens")),
        ("2000steps", (2000.0, "steps")),
        ("2 k steps", (2000.0, "steps")),
        ("3 epochs", (3.0, "epochs")),
        ("1 step more", (1.0, "step more")),
        ("T", None),
        ("-1T", None),
        ("", None),
    ],
)
def test_amounts_are_read(text: str, amount: tuple[float, str] | None) -> None:
    assert amount_in(text) == amount
