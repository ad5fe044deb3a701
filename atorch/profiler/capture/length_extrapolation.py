"""Records of long samples, from those of short ones.

What stands in for a fused scan goes through its tokens one by one, and takes minutes at full length. A block calls the
same operations at any length, and what each reads, writes and computes is at most quadratic in the tokens: three short
samples determine it, and a fourth tells whether they do. What goes through chunks is quick enough at full length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from atorch.profiler.capture.recording import Recorder

TIMES = (1, 2, 3)
CHECK = 5
UNIT = 4  # tokens
_TOLERANCE = 0.01
_OF_OPERATION = ("moved_bytes", "working_bytes", "data_bytes", "flops", "head_dim", "batch", "count")
_OF_NODE = ("rows", "inner", "columns", "elements", "left")


def foretold(record: Callable[[int], Recorder], length: int) -> Recorder | None:
    """The record of a sample of `length` tokens; None where it has no loop over tokens, or short samples do not tell.

    Args:
        record: records a sample of so many tokens.
    """
    short: list[Recorder] = []
    for times in (*TIMES, CHECK):
        short.append(record(times * UNIT))
        if len(short) > 1 and _num_calls(short[-1]) == _num_calls(short[-2]):
            return None
    check = short.pop()
    if not _is_alike([*short, check]):
        return None
    seen = [_get(slot) for slot in _slots(check)]
    found = [value for _, value in _foretold(short, CHECK)]
    if any(abs(one - two) > _TOLERANCE * two for one, two in zip(found, seen, strict=True)):
        return None
    return at_length(short, length)


def at_length(short: Sequence[Recorder], length: int) -> Recorder:
    """The last of records of TIMES units of tokens, with the numbers of `length` tokens."""
    for (home, name), value in list(_foretold(short, length / UNIT)):
        if isinstance(home, dict):
            home[name] = value
        else:
            setattr(home, name, value)
    return short[-1]


def _foretold(short: Sequence[Recorder], times: float) -> Iterator[tuple[tuple[Any, Any], float]]:
    """Each number's place in the last record, and its value at so many units, on a parabola (Lagrange's formula)."""
    weights = ((times - 2) * (times - 3) / 2, -(times - 1) * (times - 3), (times - 1) * (times - 2) / 2)
    for slots in zip(*map(_slots, short), strict=True):
        values = [_get(slot) for slot in slots]
        found = sum(weight * value for weight, value in zip(weights, values, strict=True))
        yield slots[-1], round(found) if isinstance(values[-1], int) else found


def _num_calls(recorder: Recorder) -> int:
    return sum(each.num_calls for each in recorder.stretches)


def _slots(recorder: Recorder) -> Iterator[tuple[Any, Any]]:
    """The places of a record's numbers, each as an object or a dict and the name there."""
    yield recorder, "output_bytes"
    for stretch in recorder.stretches:
        yield stretch, "seq_len"
        for sizes in (stretch.saved, stretch.inputs, stretch.read):
            yield from ((sizes, value) for value in sizes)
        for operation in stretch.operations:
            yield from ((operation, name) for name in _OF_OPERATION)
            yield from ((operation.node, name) for name in _OF_NODE)


def _get(slot: tuple[Any, Any]) -> float:
    home, name = slot
    found: float = home[name] if isinstance(home, dict) else getattr(home, name)
    return found


def _is_alike(recorders: Sequence[Recorder]) -> bool:
    """True if the same operations ran, on as many values."""
    first, *others = (
        [
            (each.block, len(each.saved), len(each.inputs), len(each.read), [one.node.kind for one in each.operations])
            for each in recorder.stretches
        ]
        for recorder in recorders
    )
    return all(each == first for each in others)
