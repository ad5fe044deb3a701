"""Reads files of torch.save as weights only: tensors and plain data, without running code."""

from __future__ import annotations

import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from atorch.errors import CheckpointError, shown
from atorch.files import AnyPath, FileKind, check_source

CHECKPOINT = FileKind("checkpoint", CheckpointError)

# Exceptions of torch for a foreign file, or one that holds more than weights.
_BROKEN = (OSError, EOFError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError)
_UNPICKLING: type[Exception] = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]
UNREADABLE = (*_BROKEN, OverflowError, struct.error, zipfile.BadZipFile, _UNPICKLING)

# All that a file with nothing but tensors and plain data refers to. torch itself allows more, such as `bytearray`.
_OF_TENSORS = re.compile(
    r"collections OrderedDict|torch(\.storage)? \w+Storage|torch Size|torch \w*(int|float|complex|bool)\w*|"
    r"torch._utils _rebuild_(tensor_v[23]|parameter)|torch Tensor|torch._tensor _rebuild_from_type_v2"
)
_MAX_TUPLES = 100
_REFERRING = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"})  # as torch.save never does


def read_weights(
    path: AnyPath,
    advice: str,
    map_location: Any = "cpu",
    mmap: bool | None = None,
    classes: Mapping[str, Any] | None = None,
) -> Any:
    """Read a file's weights, without running code. `advice` is the end of error messages.

    map_location, mmap: as for torch.load.
    classes: what stands for the classes that the file may refer to, as for `check_archive`; for files of strangers.

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
        if classes is not None:
            with open(path, "rb") as file:
                try:
                    check_archive(file, classes)
                except CheckpointError as error:
                    raise CheckpointError(f"{shown(str(path))} is not read: {error}; {advice}") from None
        allowed: list[Any] = [(value, name.replace(" ", ".")) for name, value in (classes or {}).items()]
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read as weights: {_why(error)}; {advice}") from error


def check_archive(file: BinaryIO, classes: Mapping[str, Any]) -> None:
    """Refuse a file of torch.save that takes more memory than its size, or refers to more than tensors and `classes`.

    classes: by module and name, with a space between them.

    Raises:
        CheckpointError: it is such a file.
        Exception: one of `UNREADABLE`: it is no file of torch.save.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > file.seek(0, 2):
            raise CheckpointError("it holds more bytes than it has, and torch.save does not compress")
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                check_pickle(archive.read(entry), classes)


def check_pickle(data: bytes, classes: Mapping[str, Any] | None = None) -> None:
    """Refuse a pickle that takes much more memory than its size; with `classes`, also as `check_archive`."""
    depths = _TupleDepths()
    for number, (opcode, arg, _) in enumerate(pickletools.genops(data)):
        depths.follow(opcode, arg)
        if opcode.name in ("PUT", "LONG_BINPUT") and int(arg or 0) > number:
            raise CheckpointError("its pickle has places for more values than it holds")
        if classes is not None and (
            opcode.name in _REFERRING
            or (opcode.name == "GLOBAL" and arg not in classes and not _OF_TENSORS.fullmatch(str(arg)))
        ):
            name = str(arg).replace(" ", ".") if opcode.name == "GLOBAL" else "something"
            raise CheckpointError(f"it refers to {name}, which is neither a tensor nor plain data")


class _TupleDepths:
    """Follows the depths of nested tuples on a pickle's stack; the hash of a deep one would overflow that of C."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def follow(self, opcode: Any, arg: Any) -> None:
        name, before = opcode.name, opcode.stack_before
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if arg is None else int(arg)] = self._stack[-1] if self._stack else 0
            return
        count, popped = len(before), []
        if pickletools.markobject in before:
            count = before.index(pickletools.markobject)
            while self._stack and (top := self._stack.pop()) >= 0:
                popped.append(top)
        popped += [self._stack.pop() for _ in range(count) if self._stack]
        pushed = [0] * len(opcode.stack_after)
        if name in ("GET", "BINGET", "LONG_BINGET"):
            pushed = [self._memo.get(int(arg), 0)]
        elif "TUPLE" in name:
            pushed = [1 + max(popped, default=0)]
        elif name == "DUP":
            pushed = popped * 2
        elif name == "MARK":
            pushed = [-1]
        if max(pushed, default=0) > _MAX_TUPLES:
            raise CheckpointError(f"its pickle nests tuples deeper than {_MAX_TUPLES} levels")
        self._stack += pushed


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
