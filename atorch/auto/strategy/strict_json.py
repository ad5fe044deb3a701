"""JSON read under limits, with the place of every fault.

A strategy file may come from anyone. Its size is checked before it is parsed and its depth before the parser recurses;
numbers stay text until their size is known. So nothing that a file can hold makes the parser fail in another way than
a `StrategyError`, which names the line and column of bad syntax and the JSON path of a bad value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from atorch.errors import StrategyError, shown

Json: TypeAlias = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_BYTES = 1024**2
MAX_DEPTH = 32
MAX_VALUES = 50_000
MAX_STRING = 8_192  # characters
MAX_INTEGER = 2**63 - 1
_MAX_NUMBER = 64  # characters of a number's text

_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Number(str):
    """The text of a number, NaN or Infinity."""

    __slots__ = ()


class _Object:
    """The members of an object in order, repeated keys included."""

    def __init__(self, members: list[tuple[str, Any]]) -> None:
        self.members = members


def parse(text: str | bytes) -> Json:
    """The plain data that `text` holds.

    Raises:
        StrategyError: not UTF-8, no JSON, a repeated key, NaN or Infinity, or something over its limit.
    """
    if len(text) > MAX_BYTES:
        raise StrategyError(f"more than {MAX_BYTES:,} bytes; a strategy is smaller")
    if isinstance(text, bytes):
        text = _decode(text)
    _check_depth(text)
    try:
        raw = json.loads(
            text, object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=_Number
        )
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        why = " (the text was cut short)" if is_cut else ""
        raise StrategyError(f"line {error.lineno} column {error.colno}: {error.msg}{why}") from None
    return _Reader().read(raw, "$")


def check(value: Any, place: str) -> Json:
    """A copy of Python data as the JSON values that `parse` would give back: tuples become lists.

    Raises:
        StrategyError: something that JSON does not hold, or that is over a limit of `parse`.
    """
    return _Reader().read(value, place)


def step(place: str, part: str | int) -> str:
    """The JSON path one step further: `$.methods` and 2 are `$.methods[2]`."""
    if isinstance(part, int):
        return f"{place}[{part}]"
    return f"{place}.{part}" if _PLAIN_KEY.fullmatch(part) else f"{place}[{shown(part, 60)}]"


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StrategyError(f"byte {error.start} is not UTF-8 ({error.reason}); a strategy is JSON in UTF-8") from None


def _check_depth(text: str) -> None:
    """Refuse deep nesting before the parser, which recurses, sees it."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        token = match.group()
        if token in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                line = text.count("\n", 0, match.start()) + 1
                column = match.start() - text.rfind("\n", 0, match.start())
                raise StrategyError(f"line {line} column {column}: nested deeper than {MAX_DEPTH} levels")
        elif token in "]}":
            depth -= 1


class _Reader:
    """Turns parsed or given values to plain ones, and counts them."""

    def __init__(self) -> None:
        self.num_values = 0

    def read(self, value: Any, place: str, depth: int = 0) -> Json:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise StrategyError(f"{place}: more than {MAX_VALUES:,} values; a strategy has fewer")
        if not isinstance(value, (_Object, Mapping, list, tuple)):
            return _scalar(value, place)
        if depth >= MAX_DEPTH:
            raise StrategyError(f"{place}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, (_Object, Mapping)):
            members = value.members if isinstance(value, _Object) else list(value.items())
            return self._object(members, place, depth)
        return [self.read(item, step(place, index), depth + 1) for index, item in enumerate(value)]

    def _object(self, members: list[tuple[Any, Any]], place: str, depth: int) -> dict[str, Json]:
        plain: dict[str, Json] = {}
        for key, value in members:
            if not isinstance(key, str):
                raise StrategyError(f"{place}: the key {shown(key)} is no string")
            _string(key, f"a key of {place}")
            if key in plain:
                raise StrategyError(f"{step(place, key)}: the key is there twice; leave one")
            plain[key] = self.read(value, step(place, key), depth + 1)
        return plain


def _scalar(value: Any, place: str) -> Json:
    if isinstance(value, _Number):
        value = _number(value, place)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _string(value, place)
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise StrategyError(f"{place}: an integer beyond ±{MAX_INTEGER}, which no knob takes")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StrategyError(f"{place}: {value!r} is no JSON number; write a finite one, or null")
        return float(value)
    raise StrategyError(f"{place}: {shown(value)} is a {type(value).__name__}, which JSON does not hold")


def _number(text: _Number, place: str) -> int | float:
    if text in ("NaN", "Infinity", "-Infinity"):
        return float(text)
    if len(text) > _MAX_NUMBER:
        raise StrategyError(f"{place}: a number of {len(text)} characters; one has at most {_MAX_NUMBER}")
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _string(text: str, place: str) -> str:
    if len(text) > MAX_STRING:
        raise StrategyError(f"{place}: a string of {len(text):,} characters; one has at most {MAX_STRING:,}")
    lone = _LONE_SURROGATE.search(text)
    if lone is not None:
        raise StrategyError(f"{place}: {lone.group()!r} is half a character (a lone surrogate)")
    return str.__str__(text)  # a plain str also of a subclass, such as an enum
