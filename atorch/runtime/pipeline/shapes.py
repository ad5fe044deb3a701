"""What calls returned when they ran, and what they will return on batches of other sizes.

A later stage must know what arrives before it arrives. The first batch is run once stage by stage to see shapes and
dtypes as they are under all that was done to the stages; on another batch each dimension that was as long as one of the
batch's is as long as that one is now. Dimension 0 follows the rows, the others the batch's other dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.runtime.nested import map_leaves

Sizes = Mapping[str, tuple[int, ...]]
"""The shapes of all tensors in a call's arguments, by place."""


class Shape(NamedTuple):
    """Sizes and type of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor of this shape that takes no memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.sizes)


def shape_of(tensor: Tensor) -> Shape:
    """The shape of a tensor."""
    return Shape(tuple(tensor.shape), tensor.dtype)


def sizes_of(data: Any) -> dict[str, tuple[int, ...]]:
    """The sizes of the tensors in `data`, by place."""
    found: dict[str, tuple[int, ...]] = {}

    def note(leaf: Any, place: str) -> Any:
        if isinstance(leaf, Tensor):
            found[place] = tuple(leaf.shape)
        return leaf

    map_leaves(note, data)
    return found


def resized(table: Sequence[Sequence[Shape]], before: Sizes, now: Sizes) -> list[list[Shape]]:
    """The shapes of all calls on a batch of sizes `now`, from those on one of sizes `before`."""
    rows: dict[int, int] = {}
    others: dict[int, int] = {}
    for place in before.keys() & now.keys():
        for dim, (old, new) in enumerate(zip(before[place], now[place], strict=False)):
            if old != 1 or dim == 0:
                (others if dim else rows)[old] = new

    def size(dim: int, old: int) -> int:
        return (others if dim else rows).get(old, old)

    return [
        [Shape(tuple(size(dim, old) for dim, old in enumerate(shape.sizes)), shape.dtype) for shape in shapes]
        for shapes in table
    ]
