"""The rule table of sharded activations: what each function does to the sharded dim.

Three kinds of functions run on the ranks' parts. *Local* ones return a part of the whole result: casts, scaling by
plain numbers, views and indices. They may move the sharded dim, or merge it with others and split it again. Functions
along another dim, such as softmax, do too. *Reductions* leave few numbers, which all ranks gather. All other functions
gather first: see `sharded_activation`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atorch.runtime.tensor_parallel import split_loss
from atorch.runtime.tensor_parallel.sharded_activation import (
    MAKE_OTHERS,
    SplitTensor,
    TrackedDim,
    from_part,
    to_part,
    view_of,
    whole_of,
)


class ShardedActivation(SplitTensor):
    """A result of which this rank has a part along one dim: logits by columns, or anything by tokens."""

    @classmethod
    def on_part(cls, func: Callable[..., Any], split: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = _on_part(func, split, args, kwargs)
        if result is NotImplemented:
            split._layout.note_gather(getattr(func, "__name__", str(func)), tuple(split.shape))
        return result


def _on_part(func: Callable[..., Any], split: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in MAKE_OTHERS:
        return func(split._part, *args, **kwargs)
    if any(isinstance(argument, SplitTensor) for argument in (*args, *kwargs.values())):
        return _of_two(func, split, args, kwargs)
    for rule in _RULES.get(func, ()):
        result = applied(rule, split, *args, **kwargs)
        if result is not NotImplemented:
            return result
    call = local_call(func, tuple(split.shape), split._layout, split._axis, args, kwargs)
    if call is None:
        return NotImplemented
    part = to_part(split)
    result = call.make(part)
    if result is part:
        return split
    if not isinstance(result, Tensor):
        return result
    if result.device != part.device:
        return NotImplemented  # the group may not reach that device
    sharded = from_part(type(split), result, call.layout, call.axis)
    return view_of(split, sharded, part, lambda whole: func(whole, *args, **kwargs))


def _of_two(func: Callable[..., Any], split: SplitTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums, differences and products of two tensors that are split in the same way."""
    (other, *rest) = args or (None,)
    if func not in _ELEMENTWISE or rest or kwargs or not isinstance(other, SplitTensor) or other._is_whole:
        return NotImplemented
    from_end = split._axis - split.dim()
    if other._layout != split._layout or other._axis - other.dim() != from_end:
        return NotImplemented
    result = func(to_part(split), to_part(other))
    return split.like(result, result.dim() + from_end)


def _linear(split: SplitTensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply with parameters only: the gradient of a computed weight must be that of all samples."""
    operands = [operand for operand in (weight, bias) if operand is not None]
    is_own = split._layout.averages_gradients and all(operand.is_leaf for operand in operands)
    if split._axis == split.dim() - 1 or not is_own:
        return NotImplemented
    return split.like(F.linear(to_part(split), weight, bias))


def _by_dim(func: Callable[..., Any], split: SplitTensor, dim: Any, *args: Any, **kwargs: Any) -> Any:
    """A function along another dim, such as softmax."""
    if not isinstance(dim, int) or dim % split.dim() == split._axis or "out" in kwargs:
        return NotImplemented
    return split.like(func(to_part(split), dim, *args, **kwargs))


def _reduced(func: Callable[..., Any], split: SplitTensor, dim: Any = None, keepdim: bool = False) -> Any:
    """One number for each row along another dim, gathered to every rank."""
    if not isinstance(dim, int) or dim % split.dim() == split._axis:
        return NotImplemented
    axis_moves = not keepdim and dim % split.dim() < split._axis
    return whole_of(split.like(func(to_part(split), dim, keepdim), split._axis - axis_moves))


def _gather(split: SplitTensor, dim: int, index: Tensor) -> Any:
    """`torch.gather` along another dim, with results gathered to every rank."""
    is_cut = index.dim() == split.dim() and index.shape[split._axis] == split.shape[split._axis]
    if dim % split.dim() == split._axis or not is_cut:
        return NotImplemented
    return whole_of(split.like(to_part(split).gather(dim, split._layout.take(index, split._axis))))


def applied(rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The rule's result; NotImplemented if it does not take these: torch's functions have other names and numbers."""
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    return rule(*args, **kwargs)


class LocalCall(NamedTuple):
    """A function that makes the part of a result, and the layout of its dim `axis`."""

    make: Callable[[Tensor], Any]
    layout: Any
    axis: int


class _Operand(NamedTuple):
    func: Callable[..., Any]
    sizes: tuple[int, ...]
    layout: TrackedDim
    axis: int

    def to(self, make: Callable[[Tensor], Any], axis: int | None = None, layout: TrackedDim | None = None) -> LocalCall:
        return LocalCall(make, layout or self.layout, self.axis if axis is None else axis)

    def same(self, *args: Any, **kwargs: Any) -> LocalCall:
        """The function itself, which changes no sizes."""
        return self.to(lambda part: self.func(part, *args, **kwargs))


def local_call(
    func: Callable[..., Any],
    sizes: tuple[int, ...],
    layout: TrackedDim,
    axis: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> LocalCall | None:
    """The call of `func` on a part of a tensor of `sizes` along the dim `axis`; None if no rule applies.

    These are casts and copies, scaling and capping by plain numbers, and views and indices.
    """
    if func not in _LOCAL:
        return None
    call = applied(_LOCAL[func], _Operand(func, sizes, layout, axis), *args, **kwargs)
    return None if call is NotImplemented else call


def _cast(x: _Operand, *args: Any, **kwargs: Any) -> LocalCall | None:
    return None if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())) else x.same(*args, **kwargs)


def _scaled(x: _Operand, other: Any) -> LocalCall | None:
    """Scale by a number, or by a scalar tensor without gradient, which would need all parts."""
    is_scalar = isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad
    return x.same(other) if is_scalar or isinstance(other, (int, float)) else None


def _reshaped(x: _Operand, *wanted: Any) -> LocalCall | None:
    if len(wanted) == 1 and isinstance(wanted[0], (tuple, list)):
        wanted = tuple(wanted[0])
    if not all(isinstance(size, int) for size in wanted):
        return None
    total, known_size = math.prod(x.sizes), -math.prod(wanted) if -1 in wanted else 1
    if not known_size or not total:
        return None
    target = [total // known_size if size == -1 else size for size in wanted]
    if math.prod(target) != total:
        return None
    before = math.prod(x.sizes[: x.axis]) * x.layout.outer
    after = math.prod(x.sizes[x.axis + 1 :]) * x.layout.inner
    for dim in range(len(target)):
        outer, outer_rest = divmod(before, math.prod(target[:dim]))
        inner, inner_rest = divmod(after, math.prod(target[dim + 1 :]))
        layout = x.layout.resized(outer, inner) if outer and inner and not (outer_rest or inner_rest) else None
        if layout is not None:
            sizes = (*target[:dim], outer * layout.part_size * inner, *target[dim + 1 :])
            return x.to(lambda part: part.reshape(sizes), dim, layout)  # noqa: B023  # returned at once
    return None


def _flattened(x: _Operand, start_dim: int = 0, end_dim: int = -1) -> LocalCall | None:
    start, end = start_dim % len(x.sizes), end_dim % len(x.sizes)
    return _reshaped(x, [*x.sizes[:start], math.prod(x.sizes[start : end + 1]), *x.sizes[end + 1 :]])


def _squeezed(x: _Operand, dim: int) -> LocalCall | None:
    dim %= len(x.sizes)
    if dim == x.axis:
        return None
    return x.to(lambda part: part.squeeze(dim), x.axis - (x.sizes[dim] == 1 and dim < x.axis))


def _unsqueezed(x: _Operand, dim: int) -> LocalCall:
    dim %= len(x.sizes) + 1
    return x.to(lambda part: part.unsqueeze(dim), x.axis + (dim <= x.axis))


def _transposed(x: _Operand, dim0: int, dim1: int) -> LocalCall:
    first, second = dim0 % len(x.sizes), dim1 % len(x.sizes)
    return x.to(lambda part: part.transpose(first, second), {first: second, second: first}.get(x.axis, x.axis))


def _permuted(x: _Operand, *dims: Any) -> LocalCall:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return x.to(lambda part: part.permute(dims), [dim % len(x.sizes) for dim in dims].index(x.axis))


def _indexed(x: _Operand, index: Any) -> LocalCall | None:
    """Index the sharded dim by `:`, or by a run if its layout has windows; other dims by numbers and slices.

    Tensors of indices, or masks, may index other dims where the sharded one is the last, and stays so.
    """
    items = _spread(x.sizes, index)
    if items is None:
        return None
    layout: TrackedDim | None = x.layout
    part_index: list[Any] = []
    dim = new_dim = new_axis = 0
    for item in items:
        if dim <= x.axis < dim + _num_indexed(item):
            if not isinstance(item, slice) or not (isinstance(item.step, int) or item.step is None):
                return None
            start, stop, step = item.indices(x.sizes[x.axis])
            if (start, stop, step) != (0, x.sizes[x.axis], 1):
                layout = x.layout.window(start, stop) if step == 1 and start < stop else None
            new_axis, item = new_dim, slice(None)
        part_index.append(item)
        dim += _num_indexed(item)
        new_dim += item is None or isinstance(item, slice)
    tensors = [item for item in items if isinstance(item, Tensor)]
    if layout is None or (tensors and not (x.axis == len(x.sizes) - 1 and isinstance(items[-1], slice))):
        return None
    new_axis += max((1 if tensor.dtype == torch.bool else tensor.dim() for tensor in tensors), default=0)
    return x.to(lambda part: part[tuple(part_index)], new_axis, layout)


def _spread(sizes: tuple[int, ...], index: Any) -> Sequence[Any] | None:
    """The index items of all dims, and None for each new dim; or None if an item is of another kind."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(map(_is_index, items)):
        return None
    num_indexed = sum(map(_num_indexed, items))
    ellipses = [position for position, item in enumerate(items) if item is ...] or [len(items)]
    if num_indexed > len(sizes) or len(ellipses) > 1:
        return None
    return [*items[: ellipses[0]], *[slice(None)] * (len(sizes) - num_indexed), *items[ellipses[0] + 1 :]]


def _is_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return item.dtype == torch.int64 or (item.dtype == torch.bool and item.dim() > 0)
    return item is None or item is ... or isinstance(item, slice) or type(item) is int


def _num_indexed(item: Any) -> int:
    """The number of dims that one index item takes."""
    if item is None or item is ...:
        return 0
    return int(item.dim()) if isinstance(item, Tensor) and item.dtype == torch.bool else 1


CASTS: frozenset[Callable[..., Any]] = frozenset(
    (
        *(Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.cpu, Tensor.cuda),
        *(Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach, torch.detach),
    )
)
SCALES = (Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide)
_LOCAL: Mapping[Callable[..., Any], Callable[..., LocalCall | None]] = {
    **dict.fromkeys((*CASTS, Tensor.tanh, torch.tanh), _cast),
    **dict.fromkeys(SCALES, _scaled),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.squeeze, torch.squeeze), _squeezed),
    **dict.fromkeys((Tensor.unsqueeze, torch.unsqueeze), _unsqueezed),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _transposed),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    Tensor.__getitem__: _indexed,
}
_ELEMENTWISE = frozenset((Tensor.add, torch.add, Tensor.sub, torch.sub, Tensor.mul, torch.mul))
_RULES: Mapping[Callable[..., Any], Sequence[Callable[..., Any]]] = {
    **{func: [partial(split_loss.loss, func)] for func in (F.cross_entropy, F.nll_loss)},
    F.linear: [_linear],
    **{func: [partial(_by_dim, func)] for func in (F.softmax, torch.softmax, Tensor.softmax)},
    **{func: [partial(_reduced, func)] for func in (torch.argmax, Tensor.argmax)},
    **{func: [split_loss.logsumexp, partial(_reduced, func)] for func in (torch.logsumexp, Tensor.logsumexp)},
    **{
        func: [split_loss.log_softmax, partial(_by_dim, func)]
        for func in (F.log_softmax, torch.log_softmax, Tensor.log_softmax)
    },
    **dict.fromkeys((torch.gather, Tensor.gather), [split_loss.gather, _gather]),
}
"""The rules of each function; the first that takes the arguments gives the result."""
