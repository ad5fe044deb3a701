"""A batch in pieces along dimension 0, and what the pieces give put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from atorch.errors import ArgumentError
from atorch.model.pytree import is_strings, leaves_of, map_leaves, refilled, tensors_in


def num_rows(**data: Any) -> int:
    """The size of dimension 0 that all tensors in `data` share; those of size 1, and scalars, do not count.

    Raises:
        ArgumentError: tensors differ; both are named, by the keywords of this call.
    """
    leaves = (pair for name, value in data.items() for pair in leaves_of(value, name))
    found = [(place, leaf.shape[0]) for place, leaf in leaves if isinstance(leaf, torch.Tensor) and _has_rows(leaf)]
    for place, size in found:
        if size != found[0][1]:
            raise ArgumentError(
                f"micro-batches split every tensor along dimension 0, but {found[0][0]} has {found[0][1]} rows there "
                f"and {place} has {size}. Give each tensor one row a sample, or a single row for all"
            )
    return found[0][1] if found else 1


def shared_rows(data: Any) -> int | None:
    """The largest number that all tensors of `data` have rows of, or a multiple: tokens laid out in a row count, too.

    Tensors of one row, and scalars, do not count. None where there is no such number: a graph, say.
    """
    sizes = {leaf.shape[0] for leaf in tensors_in(data) if _has_rows(leaf)}
    rows = min(sizes, default=1)
    return rows if rows and all(size % rows == 0 for size in sizes) else None


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] != 1


def portion(data: Any, start: int, stop: int, rows: int) -> Any:
    """A copy of rows `start` to `stop` of everything in `data` that has `rows` rows, or a multiple of them."""

    def cut(leaf: Any, place: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            each = leaf.shape[0] // rows if leaf.dim() > 0 and leaf.shape[0] % rows == 0 else 0
            return leaf.detach()[start * each : stop * each].clone() if each else leaf.detach().clone()
        return leaf[start:stop] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def joined(one: Any, two: Any, rows: int, more: int) -> Any:
    """The `rows` rows of one and the `more` rows of another as one; of what has no rows, the first's."""
    rest = iter(leaves_of(two))

    def join(leaf: Any, place: str) -> Any:
        _, other = next(rest)
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            has_rows = leaf.dim() > 0 and leaf.shape[0] % rows == 0 and other.shape[0] % more == 0
            return torch.cat([leaf, other]) if has_rows else leaf
        return [*leaf, *other] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(join, one)


def take(data: Any, start: int, stop: int, rows: int) -> Any:
    """Rows `start` to `stop` of everything in `data` that has `rows` rows: tensors (views) and lists of strings."""

    def cut(leaf: Any, place: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[start:stop] if leaf.dim() > 0 and leaf.shape[0] == rows else leaf
        return leaf[start:stop] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def merge(pieces: Sequence[Any], weights: Sequence[float]) -> Any:
    """The results of the pieces, as if from the whole.

    Numbers and scalar tensors are summed up by weight (a weight of 0 leaves out even NaN), tensors concatenated along
    dimension 0, containers merged item by item. Of anything else the last is taken.
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
