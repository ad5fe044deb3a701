"""Tensors of which each rank has some tokens: results of a model outside of its blocks, the logits the largest.

Token-local work runs on a rank's own tokens: modules that passed a trial (`token_local_modules`), products, casts,
views. Cross entropies and the like need no gathered logits: each rank computes one number per token, and all ranks
gather these. Everything else gathers first: see `sharded_activation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from atorch.logs import logger
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.sequence_parallel.tokens import Tokens
from atorch.runtime.sequence_parallel.view_rules import viewed
from atorch.runtime.tensor_parallel.sharded_activation import (
    MAKE_OTHERS,
    SplitTensor,
    from_part,
    to_part,
    view_of,
    whole_of,
)
from atorch.runtime.tensor_parallel.sharding_rules import CASTS, has_parameters
from atorch.runtime.tensor_parallel.split_loss import ClassTargets


class SplitTokens(SplitTensor):
    """A tensor of which this rank holds the tokens along one dim."""

    @classmethod
    def on_part(cls, func: Callable[..., Any], split: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run functions that are known to work token by token."""
        result = _by_token(func, split, args, kwargs)
        if result is NotImplemented:
            _log_gather(func, split)
        return result


def _by_token(func: Callable[..., Any], split: SplitTokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in MAKE_OTHERS:
        return func(split._part, *args, **kwargs)
    if any(isinstance(argument, SplitTensor) for argument in (*args, *kwargs.values())):
        return _of_two(func, split, args, kwargs)
    if func in _RULES and has_parameters(_RULES[func], split, *args, **kwargs):
        return _RULES[func](split, *args, **kwargs)
    rule = viewed(func, tuple(split.shape), split._layout, split._axis, args, kwargs)
    if rule is None:
        return NotImplemented
    part = to_part(split)
    result = from_part(SplitTokens, rule.make(part), rule.tokens, rule.axis)
    return view_of(split, result, part, lambda whole: func(whole, *args, **kwargs))


def split_tokens(part: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """The tensor of which `part` holds this rank's tokens along `dim`."""
    dim %= part.dim()
    tokens: Tensor = from_part(SplitTokens, part, Tokens.all_of(share, part.shape[dim] * share.size), dim)
    return tokens


def own_tokens(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """This rank's tokens of a tensor that is whole on every rank, or split by tokens already."""
    if isinstance(x, SplitTokens) and not x._is_whole:
        tokens = x._layout
        if x._axis == dim % x.dim() and tokens == Tokens.all_of(share, tokens.count):
            return to_part(x)
    return share.scatter(x, dim)


def _of_two(func: Callable[..., Any], split: SplitTokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums, differences and products of two tensors that are split by the same tokens."""
    (other, *rest) = args or (None,)
    if func not in _ELEMENTWISE or rest or kwargs or not isinstance(other, SplitTokens) or other._is_whole:
        return NotImplemented
    from_end = split._axis - split.dim() == other._axis - other.dim()
    if other._layout != split._layout or not from_end:
        return NotImplemented
    result = func(to_part(split), to_part(other))
    return from_part(SplitTokens, result, split._layout, result.dim() + split._axis - split.dim())


def _log_gather(func: Callable[..., Any], split: SplitTokens) -> None:
    """Log a gather once for each function: the whole may be hundreds of times larger than a rank's part."""
    name, logged = getattr(func, "__name__", str(func)), split._layout.share.told
    if name not in logged:
        logged.add(name)
        logger.info(
            "%s asks for all tokens of %s: every process gathers them. Cross entropies and what works token by token "
            "do not",
            name,
            tuple(split.shape),
        )


def _split_like(split: SplitTokens, result: Tensor, axis: int | None = None) -> Any:
    return from_part(SplitTokens, result, split._layout, split._axis if axis is None else axis)


def _cast(func: Callable[..., Any], split: SplitTokens, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(argument, Tensor) for argument in (*args, *kwargs.values())):
        return NotImplemented
    part = to_part(split)
    result = func(part, *args, **kwargs)
    if result is part:
        return split
    if result.device != part.device:
        return NotImplemented
    return view_of(split, _split_like(split, result), part, lambda whole: func(whole, *args, **kwargs))


def _scaled(func: Callable[..., Any], split: SplitTokens, other: Any) -> Any:
    """Scale by a number, or by a scalar tensor without gradient."""
    is_number = isinstance(other, (int, float)) or (
        isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad
    )
    return _split_like(split, func(to_part(split), other)) if is_number else NotImplemented


def _mapped(func: Callable[..., Any], split: SplitTokens) -> Any:
    return _split_like(split, func(to_part(split)))


def _product(split: SplitTokens, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply with parameters only: the gradient of a computed weight must be that of all tokens."""
    operands = [operand for operand in (weight, bias) if operand is not None]
    if split._axis == split.dim() - 1 or not all(operand.is_leaf for operand in operands):
        return NotImplemented
    return _split_like(split, F.linear(to_part(split), weight, bias))


def _by_dim(func: Callable[..., Any], split: SplitTokens, dim: Any, *args: Any, **kwargs: Any) -> Any:
    """A function along another dim, such as softmax."""
    if not isinstance(dim, int) or dim % split.dim() == split._axis or "out" in kwargs:
        return NotImplemented
    return _split_like(split, func(to_part(split), dim, *args, **kwargs))


def _number_per_token(func: Callable[..., Any], split: SplitTokens, dim: Any = None, keepdim: bool = False) -> Any:
    """One number per token, gathered to every rank."""
    if not isinstance(dim, int) or dim % split.dim() == split._axis:
        return NotImplemented
    axis_moves = not keepdim and dim % split.dim() < split._axis
    return whole_of(_split_like(split, func(to_part(split), dim, keepdim), split._axis - axis_moves))


def _gather(split: SplitTokens, dim: int, index: Tensor) -> Any:
    """`torch.gather` within each token, with results gathered to every rank."""
    is_cut = index.dim() == split.dim() and index.shape[split._axis] == split.shape[split._axis]
    if dim % split.dim() == split._axis or not is_cut:
        return NotImplemented
    own_index = split._layout.take(index, split._axis)
    return whole_of(_split_like(split, to_part(split).gather(dim, own_index)))


def _loss(func: Callable[..., Tensor], split: SplitTokens, *args: Any, **kwargs: Any) -> Any:
    """The loss of each rank's tokens with their labels, gathered to every rank."""
    given, classes, axis = ClassTargets(*args, **kwargs), min(split.dim() - 1, 1), split._axis
    if axis == classes or not given.fit(split, classes):
        return NotImplemented
    target = given.target
    in_bounds = ((target >= 0) & (target < split.shape[classes])) | ~given.kept
    torch._assert_async(in_bounds.all(), f"a target is out of bounds: logits have {split.shape[classes]} classes")
    target_axis = axis - (axis > classes)
    own_target = split._layout.take(target, target_axis)
    options = {"label_smoothing": given.label_smoothing} if func is F.cross_entropy else {}
    part = func(to_part(split), own_target, given.weight, ignore_index=given.ignore_index, reduction="none", **options)
    losses = whole_of(_split_like(split, part, target_axis))
    return given.reduced(losses, given.shares(losses.dtype), losses.dtype)


_RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: partial(_loss, F.cross_entropy),
    F.nll_loss: partial(_loss, F.nll_loss),
    F.linear: _product,
    **{func: partial(_cast, func) for func in CASTS},
    **{func: partial(_scaled, func) for func in (Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide)},
    **{func: partial(_mapped, func) for func in (Tensor.tanh, torch.tanh)},
    **{func: partial(_by_dim, func) for func in (F.log_softmax, torch.log_softmax, Tensor.log_softmax)},
    **{func: partial(_by_dim, func) for func in (F.softmax, torch.softmax, Tensor.softmax)},
    **{func: partial(_number_per_token, func) for func in (torch.logsumexp, Tensor.logsumexp)},
    **{func: partial(_number_per_token, func) for func in (torch.argmax, Tensor.argmax)},
    **dict.fromkeys((torch.gather, Tensor.gather), _gather),
}
_ELEMENTWISE = frozenset((Tensor.add, torch.add, Tensor.sub, torch.sub, Tensor.mul, torch.mul))
