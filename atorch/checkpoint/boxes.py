"""Boxes: the rectangular parts that tensors of a whole job are cut into.

Each way to divide a tensor among ranks is a list of boxes: shards along a dim, runs of rows, ranges of the flat tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atorch.errors import CheckpointError

_MAX_TANGLED = 256  # boxes that are compared pair by pair, where no straight cut separates them
_MAX_WORK = 256  # steps for each box; cuts along each dim take few


class Box(NamedTuple):
    """A rectangular part of a tensor: one offset and one size for each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """True if the box lies within a tensor of `shape`."""
        if not len(shape) == len(self.offsets) == len(self.sizes):
            return False
        return all(
            min(offset, size) >= 0 and offset + size <= most
            for offset, size, most in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def slices(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in the values of `outer`, which contains it."""
        starts = [offset - first for offset, first in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def __str__(self) -> str:
        ends = (f"{offset}:{offset + size}" for offset, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ends)}]"


@dataclass
class LogicalTensor:
    """A tensor of the whole job, and the parts of it on this rank.

    Args:
        shape: of the whole tensor.
        dtype: as saved.
        pieces: boxes, each with a view of its local values in the box's shape, on any device, with any strides. A save
            reads the views, a load writes into them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[Box, Tensor]]


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersection(one: Box, other: Box) -> Box | None:
    """The elements that two boxes of one tensor share; None if there are none."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = [
        min(first + size, second + length)
        for first, size, second, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    ]
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """The elements [start, stop) of a tensor laid flat, as at most 2·dims - 1 boxes.

    Each box comes with the position of its first element within the flat range.
    """
    shape, strides = tuple(shape), contiguous_strides(shape)
    boxes, at = [], start
    while at < stop:
        # The outermost dim with a row that begins here and ends within the range.
        fitting = (dim for dim, row in enumerate(strides) if at % row == 0 and at + row <= stop)
        dim = next(fitting, len(shape))
        index = tuple(at // row % size for row, size in zip(strides, shape, strict=True))
        rows = min(shape[dim] - index[dim], (stop - at) // strides[dim]) if shape else 1
        sizes = (*(1,) * dim, rows, *shape[dim + 1 :]) if shape else ()
        boxes.append((Box(index, sizes), at - start))
        at += math.prod(sizes)
    return boxes


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor in elements; those of an empty one count its empty dims as 1."""
    rows = itertools.accumulate((max(size, 1) for size in reversed(shape)), lambda one, other: one * other, initial=1)
    return tuple(rows)[: len(shape)][::-1]


def check_pieces(name: str, tensor: LogicalTensor) -> None:
    """Refuse boxes of the tensor `name` that lie outside of it, or have values of another shape."""
    for box, values in tensor.pieces:
        if not box.fits(tensor.shape) or tuple(values.shape) != tuple(box.sizes):
            raise CheckpointError(
                f"{name!r}: values of shape {tuple(values.shape)} for its box {box} of {tuple(tensor.shape)}; a box "
                "lies within the tensor, and its values have its sizes"
            )


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not the whole tensor `name`, each element once. The boxes lie within `shape`.

    Raises:
        CheckpointError: boxes overlap, or elements are in none.
    """
    filled = [box for box in boxes if box.numel]
    overlap = _overlap(name, filled) if len(filled) > 1 else None
    if overlap is not None:
        one, other = overlap
        raise CheckpointError(
            f"{name!r}: its boxes {one} and {other} overlap; each element is in one box, or ranks hold equal boxes"
        )
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    if missing:
        raise CheckpointError(
            f"{name!r}: {missing:,} of its {math.prod(shape):,} elements are in no box; every element is on some rank"
        )


def _overlap(name: str, boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap; None if there are none. Straight cuts separate what ranks hold, so few are compared."""
    groups, work = [boxes], 0
    while groups:
        group = groups.pop()
        parts = next((parts for dim in range(len(group[0].sizes)) if len(parts := _cut(group, dim)) > 1), None)
        if parts is not None:
            groups += [part for part in parts if len(part) > 1]
            work += len(group)
        else:
            group.sort()  # equal ones become neighbours
            is_small = len(group) <= _MAX_TANGLED
            for one, other in itertools.combinations(group, 2) if is_small else itertools.pairwise(group):
                if intersection(one, other) is not None:
                    return one, other
            work += len(group) ** 2 if is_small else _MAX_WORK * len(boxes) + 1
        if work > _MAX_WORK * len(boxes):
            raise CheckpointError(f"{name!r}: no straight cuts separate its {len(boxes):,} boxes; cut it along dims")
    return None


def _cut(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups of the boxes between the planes across `dim` that go through none of them."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if box.offsets[dim] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offsets[dim] + box.sizes[dim])
    return parts
