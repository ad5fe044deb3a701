"""Logits of which each rank has some columns, and which are the whole ones to whoever computes with them.

A loss that is known (`split_loss`) is taken of the columns where they are. What leaves the columns alone, such as a
cast or a view of other dims (`keeping`), gives logits that are split again. Everything else gathers first: see
`split_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from atorch.runtime.split_tensor import MAKE_OTHERS, SplitTensor, from_part, to_part, view_of
from atorch.runtime.tensor_parallel import split_loss
from atorch.runtime.tensor_parallel.columns import Columns
from atorch.runtime.tensor_parallel.keeping import Parted, apart, has_parameters


class SplitLogits(SplitTensor):
    """Logits of which this rank holds the columns along one dim."""

    @classmethod
    def on_part(cls, func: Callable[..., Any], split: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is known to work on columns."""
        columns, axis = split._layout, split._axis
        if func in MAKE_OTHERS:
            return func(split._part, *args, **kwargs)
        if func in _LOSSES:
            return _loss(_LOSSES[func], split, args, kwargs)
        call = apart(func, Parted(tuple(split.shape), axis, columns.count), args, kwargs)
        if call is None:
            return NotImplemented
        part = to_part(split)
        result = func(part, *call.args, **call.kwargs)
        if result is part:
            return split
        if not isinstance(result, Tensor):
            return result
        if result.device != part.device:
            return NotImplemented  # where the group may not reach
        again = from_part(cls, result, columns, call.axis)
        return view_of(split, again, part, lambda whole: func(whole, *args, **kwargs))


def split_logits(part: Tensor, columns: Columns) -> Tensor:
    """The logits of which `part` has this rank's columns along its last dim."""
    logits: Tensor = from_part(SplitLogits, part.contiguous(), columns, part.dim() - 1)
    return logits


def _loss(loss: Callable[..., Any], logits: SplitLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(each, SplitLogits) for each in (*args, *kwargs.values())):
        return NotImplemented
    if not has_parameters(loss, logits, logits, 0, *args, **kwargs):
        return NotImplemented
    result = loss(to_part(logits), logits._layout, logits._axis, *args, **kwargs)
    if loss is not split_loss.log_softmax or result is NotImplemented:
        return result
    return from_part(SplitLogits, result, logits._layout, logits._axis)


_LOSSES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: split_loss.cross_entropy,
    F.nll_loss: split_loss.nll_loss,
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), split_loss.logsumexp),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), split_loss.log_softmax),
    **dict.fromkeys((torch.gather, Tensor.gather), split_loss.gather),
}
