"""Operations that do not change one dim of a tensor, so that they can run on a part along that dim.

These are casts and copies, scaling and capping by plain numbers, and views and indices of the other dims. `apart` gives
the arguments of such an operation on the part, and the place of the dim afterwards.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Parted(NamedTuple):
    """A tensor of `sizes`, with a part of length `width` along the dim `axis`."""

    sizes: tuple[int, ...]
    axis: int
    width: int


class ShardCall(NamedTuple):
    """Arguments for the part, after the part itself, and the dim's place in the result."""

    args: tuple[Any, ...]
    axis: int
    kwargs: Mapping[str, Any] = MappingProxyType({})


def apart(function: Callable[..., Any], parted: Parted, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The `ShardCall` of `function` on a part of its first argument; None if no rule applies."""
    if function in CASTS:
        return ShardCall(args, parted.axis, kwargs) if not any(map(_is_tensor, (*args, *kwargs.values()))) else None
    rule = _RULES.get(function)
    if rule is None or not has_parameters(rule, parted, *args, **kwargs):
        return None
    return rule(parted, *args, **kwargs)


def has_parameters(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """True if a rule takes these arguments: torch's functions take some by other names and numbers."""
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _scaled(parted: Parted, other: Any) -> ShardCall | None:
    """Scale by a number, or by a scalar tensor without gradient, which would need all parts."""
    is_number = isinstance(other, (int, float)) or (_is_tensor(other) and other.dim() == 0 and not other.requires_grad)
    return ShardCall((other,), parted.axis) if is_number else None


def _capped(parted: Parted) -> ShardCall:
    return ShardCall((), parted.axis)


def _viewed(parted: Parted, *sizes: Any) -> ShardCall | None:
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if not sizes or not all(isinstance(size, int) for size in sizes) or parted.axis != len(parted.sizes) - 1:
        return None
    known_size = -math.prod(sizes) if -1 in sizes else 1
    last = sizes[-1] if sizes[-1] != -1 else math.prod(parted.sizes) // known_size if known_size > 0 else -1
    return ShardCall(((*sizes[:-1], parted.width),), len(sizes) - 1) if last == parted.sizes[-1] else None


def _flattened(parted: Parted, start_dim: int = 0, end_dim: int = -1) -> ShardCall | None:
    start, end = start_dim % len(parted.sizes), end_dim % len(parted.sizes)
    if start <= parted.axis <= end and start != end:
        return None
    return ShardCall((start_dim, end_dim), parted.axis - (end - start if parted.axis > end else 0))


def _squeezed(parted: Parted, dim: int) -> ShardCall | None:
    dim %= len(parted.sizes)
    if dim == parted.axis:
        return None
    axis_moves = parted.sizes[dim] == 1 and dim < parted.axis
    return ShardCall((dim,), parted.axis - axis_moves)


def _unsqueezed(parted: Parted, dim: int) -> ShardCall:
    dim %= len(parted.sizes) + 1
    return ShardCall((dim,), parted.axis + (dim <= parted.axis))


def _transposed(parted: Parted, dim0: int, dim1: int) -> ShardCall:
    first, second = dim0 % len(parted.sizes), dim1 % len(parted.sizes)
    return ShardCall((dim0, dim1), {first: second, second: first}.get(parted.axis, parted.axis))


def _permuted(parted: Parted, *dims: Any) -> ShardCall:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return ShardCall((dims,), [dim % len(parted.sizes) for dim in dims].index(parted.axis))


def _indexed(parted: Parted, index: Any) -> ShardCall | None:
    """Index dims before the last, which is taken by `:` only and stays the last."""
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(map(_is_index, index)) or parted.axis != len(parted.sizes) - 1:
        return None
    taken = sum(_num_indexed(item) for item in index)
    if taken == len(parted.sizes) or (index[-1] is not ... and any(item is ... for item in index)):
        last = index[-1]
        if not isinstance(last, slice) or last.indices(parted.sizes[-1]) != (0, parted.sizes[-1], 1):
            return None
        index[-1] = slice(None)
    return ShardCall((tuple(index),), _num_dims(parted, index, taken) - 1)


def _is_index(item: Any) -> bool:
    """True if an index item is an integer, a slice, None, an ellipsis, or a tensor of booleans or integers."""
    if _is_tensor(item):
        return item.dtype in (torch.bool, torch.int64)
    return item is None or item is ... or isinstance(item, slice) or type(item) is int


def _num_indexed(item: Any) -> int:
    """The number of dims that one index item takes."""
    if item is None or item is ...:
        return 0
    return int(item.dim()) if _is_tensor(item) and item.dtype == torch.bool else 1


def _num_dims(parted: Parted, index: list[Any], taken: int) -> int:
    tensors = [item for item in index if _is_tensor(item)]
    gathered = max((1 if tensor.dtype == torch.bool else tensor.dim() for tensor in tensors), default=0)
    kept = sum(item is None or isinstance(item, slice) for item in index)
    return len(parted.sizes) - taken + kept + gathered


CASTS: frozenset[Callable[..., Any]] = frozenset(
    (
        Tensor.to,
        Tensor.type,
        Tensor.float,
        Tensor.double,
        Tensor.half,
        Tensor.bfloat16,
        Tensor.contiguous,
        Tensor.clone,
        torch.clone,
        Tensor.detach,
        torch.detach,
        Tensor.cpu,
        Tensor.cuda,
    )
)

_RULES: Mapping[Callable[..., Any], Callable[..., ShardCall | None]] = {
    **dict.fromkeys((Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide), _scaled),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _capped),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _viewed),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), _squeezed),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), _unsqueezed),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _transposed),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    Tensor.__getitem__: _indexed,
}
