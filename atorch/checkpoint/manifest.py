"""The manifest of a checkpoint: its tensors, files, and plain data. A reader trusts nothing before it is checked.

Plain data are numbers, texts, lists, tuples, dicts, None, and tensors, which are saved by names of their own. JSON has
no infinities, tuples, or keys that are no texts. Such a value is an object whose one key begins with `$`.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from atorch.checkpoint.boxes import Box, check_cover
from atorch.checkpoint.shard_file import DTYPES, Shard, Stored, check_name, num_blocks, open_regular, reporting
from atorch.errors import CheckpointError, shown
from atorch.files.strict_json import step
from atorch.units import MiB

MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_BYTES = 64 * MiB
_MAX_DIMS = 64
_MAX_TENSOR_BYTES = 2**60
_START = re.compile(rb'\{"crc32": *(\d{1,10}),')  # the checksum of all that follows it
_SHARD_NAME = re.compile(r"rank-\d{5,9}\.safetensors")


class Saved(NamedTuple):
    """A whole tensor in a checkpoint; `dtype` as files name it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """The checked content of a manifest; plain data as JSON values, `by_rank` one for each rank."""

    step: int
    world_size: int
    tensors: Mapping[str, Saved]
    shards: list[Shard]
    plain: Any
    by_rank: list[Any]

    def write(self, folder: Path) -> None:
        """Write the manifest of the checkpoint in `folder`, down to the disk.

        Raises:
            CheckpointError: it cannot be written, or is too large.
        """
        content = {
            "format": _FORMAT,
            "step": self.step,
            "world_size": self.world_size,
            "tensors": self.tensors,
            "shards": self.shards,
            "plain": self.plain,
            "by_rank": self.by_rank,
        }
        rest = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()[1:]
        data = b'{"crc32":%10d,' % zlib.crc32(rest) + rest
        if len(data) > _MAX_BYTES:
            raise CheckpointError(
                f"the manifest of step {self.step} would have {len(data):,} bytes, of at most {_MAX_BYTES:,}; save "
                "large plain data as tensors"
            )
        with reporting(f"{folder / MANIFEST} cannot be written"), open(folder / MANIFEST, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def read_manifest(folder: Path, step: int | None) -> Manifest:
    """The manifest of the checkpoint of `step` in `folder`; None: of any step.

    Raises:
        CheckpointError: it is missing, has changed since it was written, or describes no whole checkpoint of that step.
    """
    path = folder / MANIFEST
    handle, num_bytes = open_regular(path)
    with open(handle, "rb") as file:
        if num_bytes > _MAX_BYTES:
            raise CheckpointError(f"{path} has {num_bytes:,} bytes; a manifest has at most {_MAX_BYTES:,}")
        with reporting(f"{path} cannot be read"):
            data = file.read(_MAX_BYTES)
    start = _START.match(data)
    if start is None or int(start[1]) != zlib.crc32(data[start.end() :]):
        raise CheckpointError(f"{path} has changed since it was written, or is cut short; load another checkpoint")
    try:
        return _checked(json.loads(data), step)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON of a checkpoint ({error}); load another checkpoint") from None


def _checked(content: Any, step: int | None) -> Manifest:
    content = need(content, dict, "the manifest")
    if content.get("format") != _FORMAT:
        raise CheckpointError(f"its format is {shown(content.get('format'))}, not {_FORMAT}: install another atorch")
    found = need(content.get("step"), int, "its step")
    if found < 0 or step not in (None, found):
        raise CheckpointError(f"it is of step {shown(content.get('step'))}, not {step}; give the folder its own name")
    tensors = {
        check_name(name): saved_tensor(name, saved)
        for name, saved in need(content.get("tensors"), dict, "tensors").items()
    }
    shards = [_shard(shard, tensors) for shard in need(content.get("shards"), list, "shards")]
    boxes: dict[str, list[Box]] = {name: [] for name in tensors}
    for shard in shards:
        for stored in shard.stored:
            boxes[stored.tensor].append(stored.box)
    if len({shard.name for shard in shards}) != len(shards):
        raise CheckpointError("it lists a file twice")
    for name, saved in tensors.items():
        check_cover(name, saved.shape, boxes[name])
    by_rank = need(content.get("by_rank"), list, "by_rank")
    if content.get("world_size") != len(by_rank) or not by_rank:
        raise CheckpointError(f"its world_size is {shown(content.get('world_size'))}, with {len(by_rank)} by_rank")
    return Manifest(found, len(by_rank), tensors, shards, content.get("plain"), by_rank)


def saved_tensor(name: str, given: Any) -> Saved:
    """The tensor that `given` describes, a list of shape and dtype.

    Raises:
        CheckpointError: it is no such list.
    """
    shape, dtype = fields(given, 2, f"tensors[{shown(name)}]")
    shape = _sizes(shape, f"the shape of {shown(name)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{shown(name)} is of dtype {shown(dtype)}; known: {', '.join(DTYPES)}")
    if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > _MAX_TENSOR_BYTES:
        raise CheckpointError(f"{shown(name)} has the shape {shown(shape)}, more than any tensor")
    return Saved(shape, dtype)


def _shard(given: Any, tensors: Mapping[str, Saved]) -> Shard:
    name, num_bytes, listed = fields(given, 3, "a file")
    if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
        raise CheckpointError(f"{shown(name)} is no name of a file; one is rank-00000.safetensors")
    stored = [_stored(item, tensors) for item in need(listed, list, name)]
    return Shard(name, need(num_bytes, int, f"the size of {name}"), stored)


def _stored(given: Any, tensors: Mapping[str, Saved]) -> Stored:
    name, box, checksums = fields(given, 3, "a piece")
    if not isinstance(name, str) or name not in tensors:
        raise CheckpointError(f"a piece is of {shown(name)}, which is none of its tensors")
    what = f"a piece of {shown(name)}"
    offsets, sizes = fields(box, 2, what)
    box, saved = Box(_sizes(offsets, what), _sizes(sizes, what)), tensors[name]
    if not box.fits(saved.shape) or not box.numel:
        raise CheckpointError(f"{what} is {shown(given[1])}, no part of its shape {list(saved.shape)}")
    sums = [need(checksum, int, what) for checksum in need(checksums, list, what)]
    if len(sums) != num_blocks(box, saved.dtype):
        raise CheckpointError(f"{what} has {len(sums)} checksums for {num_blocks(box, saved.dtype)} blocks")
    return Stored(name, box, sums)


def _sizes(given: Any, what: str) -> tuple[int, ...]:
    sizes = tuple(need(given, list, what))
    if len(sizes) > _MAX_DIMS or not all(type(size) is int and 0 <= size <= _MAX_TENSOR_BYTES for size in sizes):
        raise CheckpointError(f"{what} is {shown(given)}; it has at most {_MAX_DIMS} integers from 0")
    return sizes


def fields(given: Any, number: int, what: str) -> list[Any]:
    """`given` if it is a list of so many; raises a CheckpointError if it is not."""
    if not isinstance(given, list) or len(given) != number:
        raise CheckpointError(f"{what} is {shown(given)}, no list of {number}")
    return given


def need(given: Any, kind: type[Any], what: str) -> Any:
    """`given` if it is of a type; raises a CheckpointError if it is not."""
    if type(given) is not kind:
        raise CheckpointError(f"{what} is {shown(given)}, not of type {kind.__name__}")
    return given


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
                (
                    inner(key, f"a key of {place}", depth + 1),
                    inner(item, step(place, key if isinstance(key, int) else str(key)), depth + 1),
                )
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


def _text(value: str, place: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{place}: {shown(value)} has no form in UTF-8; save its bytes as a tensor") from None
    return str.__str__(value)
