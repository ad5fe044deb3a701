"""Shard files: the pieces that one rank writes, as a plain safetensors file, with a checksum for each block of a piece.

The key of a piece is its tensor's name N, or N@0, N@1, … where the file holds several pieces of the tensor. Pieces lie
in the order of their list, those with the largest elements first: aligned, without gaps.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import operator
import os
import stat
import struct
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atorch.checkpoint.boxes import Box, contiguous_strides, flat_boxes, intersection
from atorch.errors import CheckpointError, shown
from atorch.units import MiB

BLOCK_BYTES = 4 * MiB  # the unit of checksums, and of staging
_STARTED_BYTES = 8 * MiB  # that the system begins to write at a time
_BESIDE_BYTES = 256 * 1024  # of a block whose checksum takes longer than to hand it to another thread
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: the size stays that of what is written
_ALIGNMENT = 16  # of the data within the file: the largest element

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C128": torch.complex128,
    "C32": torch.complex32,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F4_X2": torch.float4_e2m1fn_x2,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
_BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Dtypes that safetensors does not have: the dtype in the file, and the dims that follow those of the tensor.
_STORED_AS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "C128": ("F64", (2,)),
    "C32": ("F16", (2,)),
    "F4_X2": ("U8", ()),
}


class Stored(NamedTuple):
    """A piece of a tensor in a shard file, with the crc32 of each of its blocks."""

    tensor: str
    box: Box
    checksums: list[int]


class Shard(NamedTuple):
    """A shard file as the manifest lists it."""

    name: str
    num_bytes: int
    stored: list[Stored]


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The name of a dtype in files.

    Raises:
        CheckpointError: files do not hold the dtype of the tensor `name`.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"{name!r} is of {dtype}, which checkpoints do not hold; convert it before the save")
    return NAMES[dtype]


def num_blocks(box: Box, dtype: str) -> int:
    """The number of checksums of a piece."""
    return -(-box.numel * DTYPES[dtype].itemsize // BLOCK_BYTES)


def header(pieces: Sequence[tuple[str, str, Box]]) -> bytes:
    """The first bytes of a shard file with these pieces: tensor, name of the dtype, box."""
    counts, seen, at = Counter(tensor for tensor, _, _ in pieces), Counter[str](), 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, dtype, box in pieces:
        key = tensor if counts[tensor] == 1 else f"{tensor}@{seen[tensor]}"
        seen[tensor] += 1
        if key in entries:
            raise CheckpointError(f"{key!r} would name two tensors of a file; rename one of them")
        stored_as, dims = _STORED_AS.get(dtype, (dtype, ()))
        num_bytes = box.numel * DTYPES[dtype].itemsize
        entries[key] = {"dtype": stored_as, "shape": [*box.sizes, *dims], "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def write_shard(
    path: Path,
    pieces: Sequence[tuple[str, str, Box, Tensor | Callable[[], Tensor]]],
    pause: Callable[[], object] | None = None,
) -> Shard:
    """Write a file that is not there yet, down to the disk. Pieces: tensor, name of its dtype as saved, box, values.

    Values may be a function that returns them, called when they are written. Those that lie elsewhere or otherwise than
    in the file are staged, a block at a time. `pause` is called after each block; without it, a second thread takes the
    checksums.

    Raises:
        CheckpointError: the file cannot be written, or two pieces would have one key.
    """
    pieces = sorted(pieces, key=lambda piece: -DTYPES[piece[1]].itemsize)
    stored, begin = [], header([piece[:3] for piece in pieces])
    with reporting(f"{path} cannot be written"), open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as thread:
        handle, at, started = file.fileno(), len(begin), 0
        _reserve(handle, at + sum(box.numel * DTYPES[dtype].itemsize for _, dtype, box, _ in pieces))
        write_all(handle, memoryview(begin))
        for tensor, dtype, box, values in pieces:
            checksums = []
            values = values if isinstance(values, Tensor) else values()
            for block in _blocks(values.detach(), DTYPES[dtype]):
                is_large = pause is None and len(block) >= _BESIDE_BYTES
                checksum = thread.submit(zlib.crc32, block).result if is_large else partial(zlib.crc32, block)
                write_all(handle, block)
                checksums.append(checksum())
                at += len(block)
                if at - started >= _STARTED_BYTES and hasattr(os, "posix_fadvise"):
                    # Linux begins to write these pages to the disk, and does not wait for them.
                    os.posix_fadvise(handle, started, at - started, os.POSIX_FADV_DONTNEED)
                    started = at
                if pause is not None:
                    pause()
            stored.append(Stored(tensor, box, checksums))
        os.fsync(handle)
        return Shard(path.name, at, stored)


def _reserve(handle: int, num_bytes: int) -> None:
    """Reserve room for a file, whose blocks the disk then writes faster, where Linux and the file system can.

    `os.posix_fallocate` is not for this: where the file system cannot, it writes zeros itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).fallocate(handle, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(num_bytes))


def write_all(handle: int, data: memoryview) -> None:
    """Write bytes to a file, in as many calls as it takes."""
    while data:
        data = data[os.write(handle, data) :]


def _blocks(values: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of `values` as `dtype` in order, in blocks that hold until the next one."""
    is_as_stored = values.dtype == dtype and not values.is_conj() and not values.is_neg()
    flat = values.view(-1) if is_as_stored and values.device.type == "cpu" and values.is_contiguous() else None
    if flat is not None and flat.stride() != (1,):  # a single element may have any stride
        flat = None
    length = BLOCK_BYTES // dtype.itemsize
    staging = None if flat is not None else empty((min(length, values.numel()),), dtype)
    for start in range(0, values.numel(), length):
        stop = min(start + length, values.numel())
        if staging is None:
            assert flat is not None
            block = flat[start:stop]
        else:
            block = staging[: stop - start]
            for box, at in flat_boxes(values.shape, start, stop):
                part = block[at : at + box.numel].view(box.sizes)
                copy_values(part, values[box.slices(Box((0,) * values.dim(), tuple(values.shape)))])
        yield block.view(torch.uint8).numpy().data


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without values on the CPU. torch itself warns of some dtypes."""
    return torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


def staging() -> Tensor:
    """A buffer for a block and one byte."""
    return empty((BLOCK_BYTES + 1,), torch.uint8)


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy values, cast to the target's dtype."""
    is_as_stored = not any(values.is_conj() or values.is_neg() for values in (target, source))
    if target.dtype == source.dtype and target.itemsize in _BITS and is_as_stored:
        bits = _BITS[target.itemsize]  # torch does not copy values of each dtype, or warns of it
        target, source = target.view(bits), source.view(bits)
    target.copy_(source)


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Raise OSErrors of the block, and ValueErrors for names with a NUL, as CheckpointErrors."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        earlier = "" if what.endswith("read") else "; earlier checkpoints stay as they are"
        raise CheckpointError(f"{what}: {why}{earlier}") from error


def open_regular(path: Path) -> tuple[int, int]:
    """A regular file that is no link, opened to be read: its handle and its size in bytes.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is something else.
    """
    try:
        # The name may be that of a pipe, whose opening would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; bring it back, or load another checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as an ordinary file: {error.strerror}") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is no ordinary file; load another checkpoint")
    return handle, status.st_size


class ShardReader:
    """A shard file, open to be read block by block; each block is verified.

    Args:
        dtypes: the name of each tensor's dtype.
        start: the bytes before the data, of a file that this module did not write; its pieces may have no checksums.

    Raises:
        CheckpointError: the file is missing, no regular one, or not as `shard` lists it.
    """

    def __init__(self, path: Path, shard: Shard, dtypes: Mapping[str, str], start: bytes | None = None) -> None:
        self.path, self._shard = path, shard
        self._handle, num_bytes = open_regular(path)
        self.close = weakref.finalize(self, os.close, self._handle)
        if num_bytes != shard.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes:,} bytes, and was written with {shard.num_bytes:,}; bring back the whole "
                "file, or load another checkpoint"
            )
        expected = start or header([(tensor, dtypes[tensor], box) for tensor, box, _ in shard.stored])
        with reporting(f"{path} cannot be read"):
            begin = os.pread(self._handle, len(expected), 0)
        if begin != expected:
            raise CheckpointError(f"{path} is not the file of this checkpoint: its header is another; bring that back")
        self._dtypes = [DTYPES[dtypes[stored.tensor]] for stored in shard.stored]
        lengths = [stored.box.numel * dtype.itemsize for stored, dtype in zip(shard.stored, self._dtypes, strict=True)]
        self._starts = list(itertools.accumulate(lengths, initial=len(expected)))
        if self._starts[-1] != num_bytes:
            raise CheckpointError(f"{path} does not hold the pieces that its manifest lists; load another checkpoint")

    def read(self, index: int, block: int, buffer: Tensor) -> None:
        """Fill the beginning of a uint8 `buffer` with a block, verified.

        Raises:
            CheckpointError: the bytes are not those that were written.
        """
        stored = self._shard.stored[index]
        data = buffer.numpy().data[: block_bytes(stored.box, self._dtypes[index], block)]
        start, filled = self._starts[index] + block * BLOCK_BYTES, 0
        with reporting(f"{self.path} cannot be read"):
            while filled < len(data) and (count := os.preadv(self._handle, [data[filled:]], start + filled)):
                filled += count
        if filled < len(data) or (stored.checksums and zlib.crc32(data) != stored.checksums[block]):
            raise CheckpointError(
                f"{self.path}: {stored.tensor!r} {stored.box} has changed since it was written (the checksum of its "
                f"block {block} differs); load another checkpoint"
            )


def block_bytes(box: Box, dtype: torch.dtype, block: int) -> int:
    return min(BLOCK_BYTES, box.numel * dtype.itemsize - block * BLOCK_BYTES)


def scatter(
    box: Box, dtype: torch.dtype, block: int, buffer: Tensor, targets: Sequence[tuple[Box, Tensor]]
) -> None:  # fmt: skip
    """Copy from a block of the piece `box` what it has of `targets`: other boxes of the tensor, with their values."""
    values = buffer[: block_bytes(box, dtype, block)].view(dtype)
    start = block * (BLOCK_BYTES // dtype.itemsize)
    for part, at in flat_boxes(box.sizes, start, start + len(values)):
        source = values[at : at + part.numel].view(part.sizes)
        placed = Box(tuple(map(operator.add, box.offsets, part.offsets)), part.sizes)
        for wanted, target in targets:
            common = intersection(placed, wanted)
            if common is not None:
                copy_values(target[common.slices(wanted)], source[common.slices(placed)])


def touched(sizes: Sequence[int], box: Box, itemsize: int) -> Iterator[int]:
    """The blocks of a piece of these sizes that hold elements of `box`, which is not empty."""
    strides = contiguous_strides(sizes)
    # Between two rows along an inner dim, no block lies that has none of them.
    outer = sum(stride * itemsize > BLOCK_BYTES for stride in strides)
    first = sum(offset * stride for offset, stride in zip(box.offsets[outer:], strides[outer:], strict=True))
    extent = sum((size - 1) * stride for size, stride in zip(box.sizes[outer:], strides[outer:], strict=True))
    rows = (range(offset, offset + size) for offset, size in zip(box.offsets[:outer], box.sizes[:outer], strict=True))
    for row in itertools.product(*rows):
        start = (sum(map(operator.mul, row, strides)) + first) * itemsize
        yield from range(start // BLOCK_BYTES, (start + (extent + 1) * itemsize - 1) // BLOCK_BYTES + 1)


def check_name(name: object) -> str:
    """`name` if it is one of a tensor.

    Raises:
        CheckpointError: it is no text, reserved, or has no form in UTF-8.
    """
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise CheckpointError(f"{shown(name)} is no name of a tensor; give a text, other than '__metadata__'")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{shown(name)} is no name of a tensor: it has no form in UTF-8") from None
    return name
