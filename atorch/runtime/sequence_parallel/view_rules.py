"""Views of tensors of which each rank has some tokens: the same view of a rank's part, and its tokens afterwards.

The dim of tokens may be moved, merged with others and split again, and lose tokens at its ends. A rank keeps the same
tokens throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.runtime.sequence_parallel.tokens import Tokens
from atorch.runtime.tensor_parallel.sharding_rules import has_parameters


class ViewRule(NamedTuple):
    """A function that makes the view of a part, the view's tokens, and their dim."""

    make: Callable[[Tensor], Tensor]
    tokens: Tokens
    axis: int


ViewSizes = tuple[int, ...]


def viewed(
    func: Callable[..., Any],
    sizes: ViewSizes,
    tokens: Tokens,
    axis: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> ViewRule | None:
    """The rule of `func` on a tensor of `sizes` with `tokens` along the dim `axis`, or None if there is none."""
    rule = _RULES.get(func)
    if rule is None or not has_parameters(rule, sizes, tokens, axis, *args, **kwargs):
        return None
    return rule(sizes, tokens, axis, *args, **kwargs)


def _reshaped(sizes: ViewSizes, tokens: Tokens, axis: int, *wanted: Any) -> ViewRule | None:
    if len(wanted) == 1 and isinstance(wanted[0], (tuple, list)):
        wanted = tuple(wanted[0])
    if not all(isinstance(size, int) for size in wanted):
        return None
    known_size = -math.prod(wanted) if -1 in wanted else 1
    if not known_size or not math.prod(sizes):
        return None
    target = [math.prod(sizes) // known_size if size == -1 else size for size in wanted]
    if math.prod(target) != math.prod(sizes):
        return None
    before = math.prod(sizes[:axis]) * tokens.outer
    after = math.prod(sizes[axis + 1 :]) * tokens.inner
    for dim in range(len(target)):
        outer, outer_rest = divmod(before, math.prod(target[:dim]))
        inner, inner_rest = divmod(after, math.prod(target[dim + 1 :]))
        if outer and inner and not (outer_rest or inner_rest):
            part_sizes = [*target[:dim], outer * tokens.each * inner, *target[dim + 1 :]]
            return ViewRule(partial(_as_sizes, part_sizes), replace(tokens, outer=outer, inner=inner), dim)
    return None


def _as_sizes(sizes: Sequence[int], part: Tensor) -> Tensor:
    return part.reshape(tuple(sizes))


def _flattened(sizes: ViewSizes, tokens: Tokens, axis: int, start_dim: int = 0, end_dim: int = -1) -> ViewRule | None:
    start, end = start_dim % len(sizes), end_dim % len(sizes)
    target = [*sizes[:start], math.prod(sizes[start : end + 1]), *sizes[end + 1 :]]
    return _reshaped(sizes, tokens, axis, target)


def _squeezed(sizes: ViewSizes, tokens: Tokens, axis: int, dim: int) -> ViewRule | None:
    dim %= len(sizes)
    if dim == axis:
        return None
    return ViewRule(lambda part: part.squeeze(dim), tokens, axis - (sizes[dim] == 1 and dim < axis))


def _unsqueezed(sizes: ViewSizes, tokens: Tokens, axis: int, dim: int) -> ViewRule:
    dim %= len(sizes) + 1
    return ViewRule(lambda part: part.unsqueeze(dim), tokens, axis + (dim <= axis))


def _transposed(sizes: ViewSizes, tokens: Tokens, axis: int, dim0: int, dim1: int) -> ViewRule:
    first, second = dim0 % len(sizes), dim1 % len(sizes)
    new_axis = {first: second, second: first}.get(axis, axis)
    return ViewRule(lambda part: part.transpose(first, second), tokens, new_axis)


def _permuted(sizes: ViewSizes, tokens: Tokens, axis: int, *dims: Any) -> ViewRule:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return ViewRule(lambda part: part.permute(dims), tokens, [dim % len(sizes) for dim in dims].index(axis))


def _indexed(sizes: ViewSizes, tokens: Tokens, axis: int, index: Any) -> ViewRule | None:
    """Index all tokens, or a run of them if their dim has tokens only; other dims by numbers and slices."""
    items = _spread(sizes, index)
    if items is None:
        return None
    part_index: list[Any] = []
    dim = new_dim = new_axis = 0
    for item in items:
        if item is not None and dim == axis:
            if not isinstance(item, slice) or not (isinstance(item.step, int) or item.step is None):
                return None
            start, stop, step = item.indices(sizes[axis])
            is_all = (start, stop, step) == (0, sizes[axis], 1)
            if not is_all:
                if step != 1 or stop <= start or (tokens.outer, tokens.inner) != (1, 1):
                    return None
                tokens = tokens.window(start, stop)
            new_axis, item = new_dim, slice(None)
        part_index.append(item)
        dim += item is not None
        new_dim += not isinstance(item, int)
    return ViewRule(lambda part: part[tuple(part_index)], tokens, new_axis)


def _spread(sizes: ViewSizes, index: Any) -> Sequence[Any] | None:
    """One index item per dim, and None for each new dim; or None if an item is not plain."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is ... or isinstance(item, slice) or type(item) is int for item in items):
        return None
    num_indexed = sum(item is not None and item is not ... for item in items)
    if num_indexed > len(sizes) or sum(item is ... for item in items) > 1:
        return None
    if not any(item is ... for item in items):
        items.append(...)
    ellipsis = next(position for position, item in enumerate(items) if item is ...)
    return [*items[:ellipsis], *[slice(None)] * (len(sizes) - num_indexed), *items[ellipsis + 1 :]]


_RULES: Mapping[Callable[..., Any], Callable[..., ViewRule | None]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), _squeezed),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), _unsqueezed),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _transposed),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    Tensor.__getitem__: _indexed,
}
