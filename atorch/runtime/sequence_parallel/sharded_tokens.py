"""Tensors of which each rank has some tokens: what a model computes outside of its blocks, its logits the largest.

What works token by token is computed of a rank's own tokens: modules that were found to (`outside`), products, casts,
views. Of logits cross entropies and their kin are taken where they are: each rank makes one number a token, which all
ranks then are told. Everything else gathers first: see `split_tensor`.
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
from atorch.runtime.tensor_parallel.split_loss import are_classes_of, reduced


class SplitTokens(SplitTensor):
    """A tensor of which this rank holds the tokens along one dim."""

    @classmethod
    def on_part(cls, func: Callable[..., Any], split: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is known to work token by token."""
        result = _by_token(func, split, args, kwargs)
        if result is NotImplemented:
            _tell(func, split)
        return result


def _by_token(func: Callable[..., Any], split: SplitTokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in MAKE_OTHERS:
        return func(split._part, *args, **kwargs)
    if any(isinstance(each, SplitTensor) for each in (*args, *kwargs.values())):
        return _of_two(func, split, args, kwargs)
    if func in _RULES and has_parameters(_RULES[func], split, *args, **kwargs):
        return _RULES[func](split, *args, **kwargs)
    found = viewed(func, tuple(split.shape), split._layout, split._axis, args, kwargs)
    if found is None:
        return NotImplemented
    part = to_part(split)
    again = from_part(SplitTokens, found.make(part), found.tokens, found.axis)
    return view_of(split, again, part, lambda whole: func(whole, *args, **kwargs))


def split_tokens(part: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """The tensor of which `part` has this rank's tokens along `dim`."""
    dim %= part.dim()
    tokens: Tensor = from_part(SplitTokens, part, Tokens.all_of(share, part.shape[dim] * share.size), dim)
    return tokens


def own_tokens(x: Tensor, share: TokenPartition, dim: int) -> Tensor:
    """This rank's tokens of what every rank has whole, or split by tokens already."""
    if isinstance(x, SplitTokens) and not x._is_whole:
        tokens = x._layout
        if x._axis == dim % x.dim() and tokens == Tokens.all_of(share, tokens.count):
            return to_part(x)
    return share.scatter(x, dim)


def _of_two(func: Callable[..., Any], split: SplitTokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums, differences and products of two of which ranks have the same tokens."""
    (other, *more) = args or (None,)
    if func not in _ELEMENTWISE or more or kwargs or not isinstance(other, SplitTokens) or other._is_whole:
        return NotImplemented
    from_end = split._axis - split.dim() == other._axis - other.dim()
    if other._layout != split._layout or not from_end:
        return NotImplemented
    result = func(to_part(split), to_part(other))
    return from_part(SplitTokens, result, split._layout, result.dim() + split._axis - split.dim())


def _tell(func: Callable[..., Any], split: SplitTokens) -> None:
    """Tell once for each function, since what it asks for may be hundreds of times what a process has otherwise."""
    name, told = getattr(func, "__name__", str(func)), split._layout.share.told
    if name not in told:
        told.add(name)
        logger.info(
            "%s asks for all tokens of %s: every process gathers them. Cross entropies and what works token by token "
            "do not",
            name,
            tuple(split.shape),
        )


def _again(split: SplitTokens, result: Tensor, axis: int | None = None) -> Any:
    return from_part(SplitTokens, result, split._layout, split._axis if axis is None else axis)


def _cast(func: Callable[..., Any], split: SplitTokens, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
        return NotImplemented
    part = to_part(split)
    result = func(part, *args, **kwargs)
    if result is part:
        return split
    if result.device != part.device:
        return NotImplemented
    return view_of(split, _again(split, result), part, lambda whole: func(whole, *args, **kwargs))


def _scaled(func: Callable[..., Any], split: SplitTokens, other: Any) -> Any:
    """Scale by a number, or a tensor that is one and learns nothing."""
    is_number = isinstance(other, (int, float)) or (
        isinstance(other, Tensor) and other.dim() == 0 and not other.requires_grad
    )
    return _again(split, func(to_part(split), other)) if is_number else NotImplemented


def _mapped(func: Callable[..., Any], split: SplitTokens) -> Any:
    return _again(split, func(to_part(split)))


def _product(split: SplitTokens, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply with a parameter: of what was computed a rank has all of the gradient, not that of its tokens."""
    others = [each for each in (weight, bias) if each is not None]
    if split._axis == split.dim() - 1 or not all(each.is_leaf for each in others):
        return NotImplemented
    return _again(split, F.linear(to_part(split), weight, bias))


def _by_dim(func: Callable[..., Any], split: SplitTokens, dim: Any, *args: Any, **kwargs: Any) -> Any:
    """As a softmax, over another dim."""
    if not isinstance(dim, int) or dim % split.dim() == split._axis or "out" in kwargs:
        return NotImplemented
    return _again(split, func(to_part(split), dim, *args, **kwargs))


def _number_each(func: Callable[..., Any], split: SplitTokens, dim: Any = None, keepdim: bool = False) -> Any:
    """One number a token, which every rank is told."""
    if not isinstance(dim, int) or dim % split.dim() == split._axis:
        return NotImplemented
    goes = not keepdim and dim % split.dim() < split._axis
    return whole_of(_again(split, func(to_part(split), dim, keepdim), split._axis - goes))


def _gather(split: SplitTokens, dim: int, index: Tensor) -> Any:
    """Gather of each token the same few, which every rank is told."""
    is_cut = index.dim() == split.dim() and index.shape[split._axis] == split.shape[split._axis]
    if dim % split.dim() == split._axis or not is_cut:
        return NotImplemented
    own = split._layout.take(index, split._axis)
    return whole_of(_again(split, to_part(split).gather(dim, own)))


def _loss(
    func: Callable[..., Tensor],
    split: SplitTokens,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """The loss of each rank's tokens, with the labels that are theirs."""
    classes, axis = min(split.dim() - 1, 1), split._axis
    if not (size_average is None and reduce is None) or axis == classes:
        return NotImplemented
    if not are_classes_of(split, classes, target, weight):
        return NotImplemented
    kept = target != ignore_index
    known = ((target >= 0) & (target < split.shape[classes])) | ~kept
    torch._assert_async(known.all(), f"a target is out of bounds: logits have {split.shape[classes]} classes")
    place = axis - (axis > classes)
    own = split._layout.take(target, place)
    part = func(to_part(split), own, weight, ignore_index=ignore_index, reduction="none")
    losses = whole_of(_again(split, part, place))
    shares = kept.to(losses.dtype)
    if weight is not None:
        shares = weight.to(losses.dtype)[target.masked_fill(~kept, 0)].masked_fill(~kept, 0.0)
    return reduced(losses, kept, shares, reduction, losses.dtype)


def _cross_entropy(split: SplitTokens, target: Tensor, *args: Any, label_smoothing: float = 0.0, **others: Any) -> Any:
    return _loss(partial(F.cross_entropy, label_smoothing=label_smoothing), split, target, *args, **others)


_RULES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: partial(_loss, F.nll_loss),
    F.linear: _product,
    **{each: partial(_cast, each) for each in CASTS},
    **{each: partial(_scaled, each) for each in (Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide)},
    **{each: partial(_mapped, each) for each in (Tensor.tanh, torch.tanh)},
    **{each: partial(_by_dim, each) for each in (F.log_softmax, torch.log_softmax, Tensor.log_softmax)},
    **{each: partial(_by_dim, each) for each in (F.softmax, torch.softmax, Tensor.softmax)},
    **{each: partial(_number_each, each) for each in (torch.logsumexp, Tensor.logsumexp)},
    **{each: partial(_number_each, each) for each in (torch.argmax, Tensor.argmax)},
    **dict.fromkeys((torch.gather, Tensor.gather), _gather),
}
_ELEMENTWISE = frozenset((Tensor.add, torch.add, Tensor.sub, torch.sub, Tensor.mul, torch.mul))
