"""Splits batches along dimension 0, and merges the results of the pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atorch.errors import ArgumentError
from atorch.model.pytree import is_strings, leaves_of, map_leaves, refilled, tensors_in


def num_rows(**data: Any) -> int:
    """The size of dimension 0 that all tensors in `data` share; ignores tensors of size 1 there, and scalars.

    Raises:
        ArgumentError: two tensors differ; the message names both, by the keywords of this call.
    """
    leaves = (pair for name, value in data.items() for pair in leaves_of(value, name))
    sizes = [(place, leaf.shape[0]) for place, leaf in leaves if isinstance(leaf, torch.Tensor) and _has_rows(leaf)]
    for place, size in sizes:
        if size != sizes[0][1]:
            raise ArgumentError(
                f"micro-batches split every tensor along dimension 0, but {sizes[0][0]} has {sizes[0][1]} rows there "
                f"and {place} has {size}. Give each tensor one row a sample, or a single row for all"
            )
    return sizes[0][1] if sizes else 1


def shared_rows(data: Any) -> int | None:
    """The smallest row count of the tensors in `data`, if it divides all others (as of flattened tokens), else None.

    Ignores tensors of one row, and scalars. None for example for graphs.
    """
    sizes = {leaf.shape[0] for leaf in tensors_in(data) if _has_rows(leaf)}
    rows = min(sizes, default=1)
    return rows if rows and all(size % rows == 0 for size in sizes) else None


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] != 1


def portion(data: Any, start: int, stop: int, rows: int) -> Any:
    """A copy of `data` with rows `start` to `stop` of every leaf that has `rows` rows, or a multiple of them."""

    def cut(leaf: Any, place: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            per_row = leaf.shape[0] // rows if leaf.dim() > 0 and leaf.shape[0] % rows == 0 else 0
            return leaf.detach()[start * per_row : stop * per_row].clone() if per_row else leaf.detach().clone()
        return leaf[start:stop] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def joined(one: Any, two: Any, rows: int, more: int) -> Any:
    """Concatenate the `rows` rows of `one` and the `more` rows of `two`; leaves without rows come from `one`."""
    rest = iter(leaves_of(two))

    def join(leaf: Any, place: str) -> Any:
        _, other = next(rest)
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            has_rows = leaf.dim() > 0 and leaf.shape[0] % rows == 0 and other.shape[0] % more == 0
            return torch.cat([leaf, other]) if has_rows else leaf
        return [*leaf, *other] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(join, one)


def take(data: Any, start: int, stop: int, rows: int) -> Any:
    """Slice rows `start` to `stop` of every leaf of `data` with `rows` rows: tensors (views) and lists of strings."""

    def cut(leaf: Any, place: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[start:stop] if leaf.dim() > 0 and leaf.shape[0] == rows else leaf
        return leaf[start:stop] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def merge(pieces: Sequence[Any], weights: Sequence[float]) -> Any:
    """Merge the results of the pieces into that of the full batch.

    Takes the weighted sum of numbers and scalar tensors (a weight of 0 drops even NaN), concatenates tensors along
    dimension 0, and merges containers item by item. Returns the last of anything else.
    """
    first = pieces[0]
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return torch.cat(list(pieces))
    if isinstance(first, (torch.Tensor, float, int)) and not isinstance(first, bool):
        return sum(piece * weight for piece, weight in zip(pieces, weights, strict=True) if weight)
    if isinstance(first, Mapping):
        return refilled(first, {key: merge([piece[key] for piece in pieces], weights) for key in first})
    if isinstance(first, (list, tuple)) and not is_strings(first):
        items = [merge(column, weights) for column in zip(*pieces, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return pieces[-1]
