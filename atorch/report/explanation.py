"""The figures of an explained configuration in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from atorch.report.figures import composition, slower, taken
from atorch.units import format_bytes, format_seconds

MAX_VALUE = 40  # characters of a value


def explained(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, words) of the first lines: the methods, what they take, the verdict, and the best plan."""
    best = data["best"]
    yield "methods", composition(data["strategy"])
    yield from taken(data)
    yield "fits", verdict(data)
    for reason in data["refusals"]:
        yield "note", f"atorch itself would refuse this: {reason}"
    if isinstance(best, str):
        yield "best", best
        return
    named = f" of those that {data['target']} can express" if data.get("target") else ""
    if best["strategy"] == data["strategy"]:
        yield "best", f"these methods are the best plan{named}"
        return
    figures = f"{format_seconds(best['estimate']['step_s'])}, {format_bytes(best['estimate']['peak_bytes'])} a device"
    gain = f", {slower(data, best['estimate'])}" if data["fits"] else ""
    yield "best", f"{composition(best['strategy'])}: {figures}{gain}{named}"


def verdict(data: Mapping[str, Any]) -> str:
    if not data["fits"]:
        return f"no: it {data['short']}"
    return "yes, but by less than the error of the estimate of memory" if data["fits_narrowly"] else "yes"


def improvements(data: Mapping[str, Any], most: int) -> Iterator[tuple[str, str, str, str, str]]:
    """(change, step, saved, memory needed, saved) of single changes, those that gain most first."""
    for change in data["changes"][:most]:
        share = change["saves_s"] / data["estimate"]["step_s"]
        saved = format_bytes(abs(change["saves_bytes"]))
        yield (
            change["change"],
            format_seconds(change["step_s"]),
            f"{share:.1%}",
            format_bytes(change["needed_bytes"]),
            f"{'' if change['saves_bytes'] >= 0 else '−'}{saved}",
        )


def setting(value: Any) -> str:
    """A value of a configuration, short enough for a column."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
