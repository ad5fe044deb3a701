"""JSON read under limits, with the place of every fault.

A file may come from an untrusted source. Its size is checked before parsing, and the length of a number before
conversion. So any content either parses or raises the error of the file's `Format`. It names the line and column of bad
syntax, or the JSON path of a bad value.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from atorch.errors import AtorchError, shown
from atorch.files import AnyPath, FileKind, read_bytes

Json: TypeAlias = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_INTEGER = 2**63 - 1
_MAX_NUMBER = 64  # maximum characters of a number

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Format(FileKind):
    """A kind of JSON file and its limits; `max_string` is in characters."""

    max_depth: int = 32
    max_values: int = 50_000
    max_string: int = 8_192
    allows_infinity: bool = False


class _Number(str):
    """The text of a number, NaN or Infinity."""

    __slots__ = ()


class _Object(list[tuple[str, Any]]):
    """The members of an object in order, with repeated keys."""


def read_json(path: AnyPath, form: Format) -> Json:
    """Read the plain data in a JSON file.

    Raises:
        AtorchError: of class `form.error`, with the path: it is not a readable regular file, or as `parse`.
    """
    data = read_bytes(path, form)
    try:
        return parse(data, form)
    except form.error as error:
        raise form.error(f"{shown(os.fspath(path))}: {error}") from None


def parse(text: str | bytes, form: Format) -> Json:
    """Parse JSON to plain data.

    Raises:
        AtorchError: of class `form.error`: not UTF-8, invalid JSON, a repeated key, NaN or Infinity, or over a limit.
    """
    if len(text) > form.max_bytes:
        raise form.error(f"more than {form.max_bytes:,} bytes; a {form.name} is smaller")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        raw = json.loads(
            text, object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=_Number
        )
    except UnicodeDecodeError as error:
        raise form.error(f"byte {error.start} is not UTF-8 ({error.reason}); a {form.name} is JSON in UTF-8") from None
    except RecursionError:
        raise form.error(f"nested deeper than {form.max_depth} levels") from None
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        why = " (the text was cut short)" if is_cut else ""
        raise form.error(f"line {error.lineno} column {error.colno}: {error.msg}{why}") from None
    return _Reader(form, "$").read(raw)


def check(value: Any, place: str, form: Format) -> Json:
    """Copy Python data to the JSON values that `parse` would return: tuples become lists.

    Raises:
        AtorchError: of class `form.error`: a value has no JSON form, or is over a limit of `parse`.
    """
    return _Reader(form, place).read(value)


def step(place: str, part: str | int) -> str:
    """Extend a JSON path by one step: `$.methods` and 2 give `$.methods[2]`."""
    if isinstance(part, int):
        return f"{place}[{part}]"
    return f"{place}.{part}" if _PLAIN_KEY.fullmatch(part) else f"{place}[{shown(part, 60)}]"


class _Reader:
    """Converts parsed or Python values to plain ones, and counts them. `root` is the path of the first."""

    def __init__(self, form: Format, root: str) -> None:
        self.form, self._root = form, root
        self._path: list[str | int] = []  # path of the current value; joined to text only for an error
        self._num_values = 0

    def read(self, value: Any) -> Json:
        self._num_values += 1
        if self._num_values > self.form.max_values:
            raise self._error(f"more than {self.form.max_values:,} values; a {self.form.name} has fewer")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, _Number):
            value = self._parsed(value)
        elif isinstance(value, str):
            return self._string(value)
        if isinstance(value, (int, float)):
            return self._number(value)
        if not isinstance(value, (list, tuple, Mapping)):
            raise self._error(f"{shown(value)} is a {type(value).__name__}, which JSON does not hold")
        if len(self._path) >= self.form.max_depth:
            raise self._error(f"nested deeper than {self.form.max_depth} levels")
        if isinstance(value, (_Object, Mapping)):
            return self._object(value if isinstance(value, _Object) else value.items())
        path = self._path
        path.append(0)
        plain = [self.read(item) for path[-1], item in enumerate(value)]
        path.pop()
        return plain

    def _object(self, members: Iterable[tuple[Any, Any]]) -> dict[str, Json]:
        plain: dict[str, Json] = {}
        for key, value in members:
            if not isinstance(key, str):
                raise self._error(f"the key {shown(key)} is not a string")
            self._string(key, "a key of ")
            self._path.append(key)
            if key in plain:
                raise self._error("the key is there twice; leave one")
            plain[key] = self.read(value)
            self._path.pop()
        return plain

    def _parsed(self, text: _Number) -> int | float:
        if len(text) > _MAX_NUMBER:
            raise self._error(f"a number of {len(text)} characters; one has at most {_MAX_NUMBER}")
        return int(text) if text.lstrip("-").isdigit() else float(text)

    def _number(self, value: int | float) -> int | float:
        if isinstance(value, int):
            if abs(value) > MAX_INTEGER:
                raise self._error(f"an integer beyond ±{MAX_INTEGER}, more than any that is meant")
            return int(value)
        if math.isnan(value) or (math.isinf(value) and not self.form.allows_infinity):
            raise self._error(f"{value!r} is not a JSON number; write a finite one, or null")
        return float(value)

    def _string(self, text: str, what: str = "") -> str:
        if len(text) > self.form.max_string:
            most = self.form.max_string
            raise self._error(f"a string of {len(text):,} characters; one has at most {most:,}", what)
        if not text.isascii() and (lone := _LONE_SURROGATE.search(text)) is not None:
            raise self._error(f"{lone.group()!r} is half a character (a lone surrogate)", what)
        return str.__str__(text)  # converts subclasses, such as an enum, to a plain str

    def _error(self, why: str, what: str = "") -> AtorchError:
        place = functools.reduce(step, self._path, self._root)
        return self.form.error(f"{what}{place}: {why}")
