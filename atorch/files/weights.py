"""Reads files of torch.save as weights only: tensors and plain data, without running code."""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from atorch.errors import CheckpointError, shown
from atorch.files import AnyPath, FileKind, check_source

CHECKPOINT = FileKind("checkpoint", CheckpointError)

# Exceptions of torch for a foreign file, or one that holds more than weights.
_BROKEN = (OSError, EOFError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError)
UNREADABLE = (*_BROKEN, OverflowError, struct.error, torch.serialization.pickle.UnpicklingError)  # type: ignore[attr-defined]


def read_weights(path: AnyPath, advice: str, map_location: Any = "cpu", mmap: bool | None = None) -> Any:
    """Read a file's weights, without running code. `advice` is the end of error messages.

    map_location, mmap: as for torch.load.

    Raises:
        CheckpointError: the file is missing, not regular, empty or truncated, or holds more than weights.
    """
    check_source(path, CHECKPOINT)
    try:
        with open(path, "rb") as file:
            begin = file.read(2)
        if not begin:
            raise CheckpointError(f"{shown(str(path))} is empty; {advice}")
        if begin == b"PK" and not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{shown(str(path))} is cut short: it begins as torch.save writes files, and its end is missing; copy "
                "it again, or load another one"
            )
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read as weights: {_why(error)}; {advice}") from error


def _why(error: Exception) -> str:
    """The object that is not plain data, if torch names it; else the first line of its message."""
    text = str(error)
    match = re.search(r"unsupported (?:global: )?GLOBAL (\S+)", text, re.IGNORECASE)
    if match is not None:
        return f"it holds {match[1]}, which is not plain data"
    _, _, inner = text.partition("WeightsUnpickler error:")
    lines = [line.strip() for line in (inner or text).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def is_same(one: Any, other: Any) -> bool:
    """True if two values are equal, with NaN equal to NaN, in containers of any depth.

    Raises:
        RuntimeError: torch cannot compare such tensors, or a container contains itself.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other or (one != one and other != other))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != other.layout:
        return False
    if one.layout not in (torch.strided, torch.jagged):
        one, other = one.to_sparse().coalesce(), other.to_sparse().coalesce()
        return is_same((one.indices(), one.values()), (other.indices(), other.values()))
    if one.itemsize == 1 and one.is_floating_point():  # float8 has no comparison
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
