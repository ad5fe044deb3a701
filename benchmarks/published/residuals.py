"""Where estimates are off: signed errors of runs by what differs between them, and run by run.

An error's average is that of logarithms, so that half and twice as long cancel.
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
_FEW = 12  # values of a column that are told one by one; of more, numbers by powers of two
_TOLD = tuple(name for name in GIVEN if name not in ("row_id", "params_b", "framework"))

Error = tuple[Case, float]  # and the logarithm of estimate over measured


def residuals(pairs: Iterable[tuple[Case, Result]], of: Of, rows: int) -> Iterator[str]:
    """Lines: for each framework on each device, its errors by column, then its `rows` runs that are furthest off."""
    groups: dict[tuple[str, str], list[Error]] = defaultdict(list)
    for case, result in pairs:
        error = result.time_error if of == "time" else result.memory_error
        if case.cluster is not None and error is not None and error > -1.0:
            groups[case.row.text("framework"), case.cluster.device.name].append((case, math.log1p(error)))
    for (framework, device), errors in sorted(groups.items(), key=lambda each: -_size(each[1])):
        yield f"\n{framework} on {device}: {_shown(errors)}"
        yield from _by_column(errors)
        same = {name for name in _TOLD if len({case.row.text(name) for case, _ in errors}) == 1}
        furthest = sorted(errors, key=lambda each: -abs(each[1]))[:rows]
        for case, error in sorted(furthest, key=lambda each: each[1]):
            told = (f"{name} {case.row.given[name]}" for name in _TOLD if name not in same and case.row.given[name])
            yield f"    {_percent(error):>8} {case.row.row_id}: {', '.join(told)}"


def _by_column(errors: Sequence[Error]) -> Iterator[str]:
    for name in _TOLD:
        values = {case.row.text(name) for case, _ in errors}
        if len(values) < 2:
            continue
        class_of = _classes(values)
        classes: dict[str, list[Error]] = defaultdict(list)
        for each in errors:
            classes[class_of(each[0].row.text(name))].append(each)
        if len(classes) > 1:
            yield f"  by {name}"
            for value, inside in sorted(classes.items(), key=lambda each: _number(each[0])):
                yield f"    {value or '(blank)':<28} {_shown(inside)}"


def _classes(values: set[str]) -> Callable[[str], str]:
    """What stands for a value: itself, or of many numbers the power of two below it."""
    if len(values) <= _FEW:
        return lambda value: value
    return lambda value: f"{2 ** math.floor(math.log2(number)):g}+" if (number := _number(value)[0]) > 0 else value


def _number(text: str) -> tuple[float, str]:
    try:
        return float(text.rstrip("+")), text
    except ValueError:
        return -1.0, text


def _shown(errors: Sequence[Error]) -> str:
    logs = [error for _, error in errors]
    return f"{_percent(sum(logs) / len(logs)):>8} on average, {100 * _size(errors):5.1f} % off, {len(logs):4} runs"


def _size(errors: Sequence[Error]) -> float:
    return sum(abs(math.expm1(error)) for _, error in errors) / len(errors)


def _percent(error: float) -> str:
    return f"{100 * math.expm1(error):+.1f} %"
