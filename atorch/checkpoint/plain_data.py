"""Plain data as JSON: numbers, texts, lists, tuples, dicts, None, and tensors, which are saved by names of their own.

JSON has no infinities, tuples, or keys that are no texts. Such a value is an object whose one key begins with `$`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from atorch.errors import CheckpointError, shown
from atorch.files.strict_json import step

_MAX_DEPTH = 64
_MAX_BITS = 8192  # of an integer; numbers that seed generators have hundreds


def encoded(value: Any, place: str, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """JSON values for plain data. Tensors are added to `tensors`, under names that begin with `prefix`.

    Subclasses of dict, tuple, list and numbers become the plain class, but for Counter.

    Raises:
        CheckpointError: a value is neither plain data nor a tensor; the message has its path, from `place` on.
    """

    def inner(value: Any, place: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise CheckpointError(f"{place}: nested deeper than {_MAX_DEPTH} levels; save a flatter value")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return _text(value, place)
        if isinstance(value, int):
            if value.bit_length() > _MAX_BITS:
                raise CheckpointError(f"{place}: an integer of {value.bit_length():,} bits; one has {_MAX_BITS:,}")
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, Tensor):
            if hasattr(value, "placements"):
                raise CheckpointError(f"{place} is this process's part of a tensor; save the whole: full_tensor()")
            name = f"{prefix}{len(tensors)}"
            tensors[name] = value
            return {"$tensor": name}
        if isinstance(value, (list, tuple)):
            items = [inner(item, step(place, index), depth + 1) for index, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, dict):
            is_plain = type(value) is not Counter and all(isinstance(key, str) and key[:1] != "$" for key in value)
            items = [
                (inner(key, f"a key of {place}", depth + 1), inner(item, step(place, _label(key)), depth + 1))
                for key, item in value.items()
            ]
            return dict(items) if is_plain else {"$counter" if type(value) is Counter else "$dict": items}
        raise CheckpointError(
            f"{place} is {shown(value)}, a {type(value).__name__}; a checkpoint holds numbers, texts, lists, tuples, "
            "dicts, None and tensors: save its state_dict() or such values instead"
        )

    return inner(value, place, 0)


def decoded(value: Any, read: Callable[[str], Tensor]) -> Any:
    """The plain data of JSON values; `read` gives the tensor of a name.

    Raises:
        CheckpointError: no plain data encodes to the value.
    """
    if isinstance(value, list):
        return [decoded(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or tag[:1] != "$":
        return {key: decoded(item, read) for key, item in value.items()}
    content = value[tag]
    if tag == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "$tensor" and isinstance(content, str):
        return read(content)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decoded(item, read) for item in content)
    try:
        if tag in ("$dict", "$counter"):
            made = {decoded(key, read): decoded(item, read) for key, item in content}
            return Counter(made) if tag == "$counter" else made
    except (TypeError, ValueError):  # no pairs, or keys that have no hash
        pass
    raise CheckpointError(f"{shown(value)} is no plain data of a checkpoint; load another checkpoint")


def _label(key: Any) -> str | int:
    return key if isinstance(key, (str, int)) else repr(key)


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{place}: {shown(value)} has no form in UTF-8; save its bytes as a tensor") from None
    return str.__str__(value)
