"""Signed errors of estimates by the columns in which runs differ, and run by run.

Errors are averaged as logarithms, so that half and twice as long cancel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from benchmarks.published.evaluate import Case
from benchmarks.published.metrics import Result
from benchmarks.published.table import GIVEN

Of = Literal["time", "memory"]
_FEW = 12  # values of a column that are listed one by one; more are grouped by powers of two
_COLUMNS = tuple(name for name in GIVEN if name not in ("row_id", "params_b", "framework"))

Error = tuple[Case, float]  # and the logarithm of estimate over measured


def residuals(pairs: Iterable[tuple[Case, Result]], of: Of, rows: int) -> Iterator[str]:
    """Lines: for each framework on each device, its errors by column, then its `rows` runs that are furthest off."""
    groups: dict[tuple[str, str], list[Error]] = defaultdict(list)
    for case, result in pairs:
        error = result.time_error if of == "time" else result.memory_error
        if case.cluster is not None and error is not None and error > -1.0:
            groups[case.row.text("framework"), case.cluster.device.name].append((case, math.log1p(error)))
    for (framework, device), errors in sorted(groups.items(), key=lambda group: -_size(group[1])):
        yield f"\n{framework} on {device}: {_summary(errors)}"
        yield from _by_column(errors)
        same = {name for name in _COLUMNS if len({case.row.text(name) for case, _ in errors}) == 1}
        furthest = sorted(errors, key=lambda pair: -abs(pair[1]))[:rows]
        for case, error in sorted(furthest, key=lambda pair: pair[1]):
            differing = (
                f"{name} {case.row.given[name]}" for name in _COLUMNS if name not in same and case.row.given[name]
            )
            yield f"    {_percent(error):>8} {case.row.row_id}: {', '.join(differing)}"


def _by_column(errors: Sequence[Error]) -> Iterator[str]:
    for name in _COLUMNS:
        values = {case.row.text(name) for case, _ in errors}
        if len(values) < 2:
            continue
        class_of = _classes(values)
        classes: dict[str, list[Error]] = defaultdict(list)
        for error in errors:
            classes[class_of(error[0].row.text(name))].append(error)
        if len(classes) > 1:
            yield f"  by {name}"
            for value, inside in sorted(classes.items(), key=lambda item: _number(item[0])):
                yield f"    {value or '(blank)':<28} {_summary(inside)}"


def _classes(values: set[str]) -> Callable[[str], str]:
    """A function from a value to its class: itself, or with many values the power of two below it."""
    if len(values) <= _FEW:
        return lambda value: value
    return lambda value: f"{2 ** math.floor(math.log2(number)):g}+" if (number := _number(value)[0]) > 0 else value


def _number(text: str) -> tuple[float, str]:
    try:
        return float(text.rstrip("+")), text
    except ValueError:
        return -1.0, text


def _summary(errors: Sequence[Error]) -> str:
    logs = [error for _, error in errors]
    return f"{_percent(sum(logs) / len(logs)):>8} on average, {100 * _size(errors):5.1f} % off, {len(logs):4} runs"


def _size(errors: Sequence[Error]) -> float:
    return sum(abs(math.expm1(error)) for _, error in errors) / len(errors)


def _percent(error: float) -> str:
    return f"{100 * math.expm1(error):+.1f} %"
