"""Batches: split along dimension 0, merged from results of the pieces, and compared between ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import all_reduce_max
from atorch.distributed.fingerprints import both_ways
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.pytree import is_strings, leaves_of, map_leaves, refilled, tensors_in
from atorch.runtime.gradients.backward import refuse_transforms


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


LOOKS = 3  # compared passes: a loader that distributes batches by rank differs in the first
FEW = 64  # compared elements of each tensor
_DIFFERENT = (
    "processes along %s compute one batch together, and were given different ones: take result.dataloader, "
    "which deals batches out along the axes data and zero alone, or deal out yours so"
)


def watch_batches(model: nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Compare the inputs of `model` between ranks that compute one batch together, in its first training passes.

    Args:
        groups: process groups by the name of the axis along which ranks have the same batch.

    Raises:
        ArgumentError: in such a pass, on all ranks: shapes or integers, such as tokens, differ. Different
            floats, which may be rounding, are a warning.
    """
    if groups:
        model.register_forward_pre_hook(refuse_transforms)
        handle: list[Any] = []
        looking = _Looking(groups, handle)
        handle.append(model.register_forward_pre_hook(looking, with_kwargs=True))


class _Looking:
    def __init__(self, groups: Mapping[str, dist.ProcessGroup], handle: Sequence[Any]) -> None:
        self._groups, self._handle, self._left = groups, handle, LOOKS

    def __reduce__(self) -> tuple[Any, ...]:
        return _Looking, ({}, ())  # process groups cannot be pickled, and a copy of the model need not be watched

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (self._groups and model.training and torch.is_grad_enabled()):
            return
        self._left -= 1
        if self._left <= 0:
            self._handle[0].remove()
        exact: list[Any] = []
        rounded: list[Any] = []
        for place, leaf in leaves_of([args, kwargs]):
            if isinstance(leaf, Tensor):
                exact.append((place, tuple(leaf.shape)))
                (rounded if leaf.is_floating_point() else exact).append(leaf.detach().reshape(-1)[:FEW].tolist())
        hashes = [*both_ways(exact), *both_ways(rounded)]
        for group in self._groups.values():
            hashes = all_reduce_max(hashes, group)  # in the end over the product of the axes, so that all ranks raise
        high, low, rounded_high, rounded_low = hashes
        if high != -low:
            raise ArgumentError(_DIFFERENT % " × ".join(self._groups))
        if rounded_high != -rounded_low:
            logger.warning(_DIFFERENT, " × ".join(self._groups))
