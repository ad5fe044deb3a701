"""Views of tensors of which each rank has some tokens: how they are made of a rank's part, and what it then has.

The dim of tokens may be moved, be made one with others and come apart again, and lose tokens at its ends. What a rank
has is of the same tokens all along.
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
    """A function that makes a view of a part, and the part's tokens then, and their dim."""

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
    """The view that `func` gives of a tensor of such sizes, of which each rank has `tokens` along the dim `axis`."""
    rule = _RULES.get(func)
    if rule is None or not has_parameters(rule, sizes, tokens, axis, *args, **kwargs):
        return None
    return rule(sizes, tokens, axis, *args, **kwargs)


def _reshaped(sizes: ViewSizes, tokens: Tokens, axis: int, *wanted: Any) -> ViewRule | None:
    if len(wanted) == 1 and isinstance(wanted[0], (tuple, list)):
        wanted = tuple(wanted[0])
    if not all(isinstance(size, int) for size in wanted):
        return None
    known = -math.prod(wanted) if -1 in wanted else 1
    if not known or not math.prod(sizes):
        return None
    target = [math.prod(sizes) // known if size == -1 else size for size in wanted]
    if math.prod(target) != math.prod(sizes):
        return None
    before = math.prod(sizes[:axis]) * tokens.outer
    after = math.prod(sizes[axis + 1 :]) * tokens.inner
    for place in range(len(target)):
        outer, outer_rest = divmod(before, math.prod(target[:place]))
        inner, inner_rest = divmod(after, math.prod(target[place + 1 :]))
        if outer and inner and not (outer_rest or inner_rest):
            own = [*target[:place], outer * tokens.each * inner, *target[place + 1 :]]
            return ViewRule(partial(_as_sizes, own), replace(tokens, outer=outer, inner=inner), place)
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
    place = {first: second, second: first}.get(axis, axis)
    return ViewRule(lambda part: part.transpose(first, second), tokens, place)


def _permuted(sizes: ViewSizes, tokens: Tokens, axis: int, *dims: Any) -> ViewRule:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return ViewRule(lambda part: part.permute(dims), tokens, [dim % len(sizes) for dim in dims].index(axis))


def _indexed(sizes: ViewSizes, tokens: Tokens, axis: int, index: Any) -> ViewRule | None:
    """A view of all tokens, or of a run where the dim is one of tokens alone; of others by numbers and slices."""
    items = _spread(sizes, index)
    if items is None:
        return None
    own: list[Any] = []
    dim = made = place = 0
    for each in items:
        if each is not None and dim == axis:
            if not isinstance(each, slice) or not (isinstance(each.step, int) or each.step is None):
                return None
            start, stop, step = each.indices(sizes[axis])
            is_all = (start, stop, step) == (0, sizes[axis], 1)
            if not is_all:
                if step != 1 or stop <= start or (tokens.outer, tokens.inner) != (1, 1):
                    return None
                tokens = tokens.window(start, stop)
            place, each = made, slice(None)
        own.append(each)
        dim += each is not None
        made += not isinstance(each, int)
    return ViewRule(lambda part: part[tuple(own)], tokens, place)


def _spread(sizes: ViewSizes, index: Any) -> Sequence[Any] | None:
    """The item asked of each dim, and None where a new one is made; None for what is not plain."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is ... or isinstance(each, slice) or type(each) is int for each in items):
        return None
    taken = sum(each is not None and each is not ... for each in items)
    if taken > len(sizes) or sum(each is ... for each in items) > 1:
        return None
    if not any(each is ... for each in items):
        items.append(...)
    at = next(place for place, each in enumerate(items) if each is ...)
    return [*items[:at], *[slice(None)] * (len(sizes) - taken), *items[at + 1 :]]


_RULES: Mapping[Callable[..., Any], Callable[..., ViewRule | None]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), _squeezed),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), _unsqueezed),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _transposed),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    Tensor.__getitem__: _indexed,
}
