"""Losses of lazy logits: one number a row, by torch's own functions on a chunk's logits.

A loss that is one number of all rows takes its gradients in forward, so that logits are computed once. In fp16,
gradients need the loss scale, or they vanish. There, and where every row has a gradient of its own, backward computes
each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.runtime.loss.logit_chunks import LogitGradients, LogitProduct, Needs, Reading, add_gradients, numbers
from atorch.runtime.tensor_parallel.split_loss import are_classes_of

Term = Callable[[LogitProduct, Needs, "LogitGradients | None"], LogitGradients]
"""(product, operands that need gradients, sum of earlier terms or None) → gradients with this term added."""


class Like(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tensor.shape, tensor.dtype, tensor.device)


class LazyGradient(Tensor):
    """The gradient of logits: a tensor of their shape that is never computed."""

    _terms: tuple[Term, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Like, terms: tuple[Term, ...]) -> LazyGradient:
        gradient: LazyGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        gradient._terms = terms
        return gradient

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LazyGradient({tuple(self.shape)}, never computed)"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], (Like.of(self), self._terms)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, sizes: Any, strides: Any) -> LazyGradient:
        return cls(*context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Handle the operations of autograd itself: it adds and copies gradients."""
        if func in _SUMS and not kwargs:
            first, second = args
            return LazyGradient(Like.of(first), (*terms_of(first), *terms_of(second)))
        if func in _COPIES:
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            return LazyGradient(Like.of(args[0])._replace(dtype=dtype), args[0]._terms)
        raise ArgumentError(
            f"{func} was asked of the gradient of logits, which cross_entropy never computes; take gradients of the "
            "model's parameters, or leave cross_entropy out"
        )


_SUMS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))
_COPIES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default))


def terms_of(grad: Tensor) -> tuple[Term, ...]:
    """The terms of a gradient of a head's logits, lazy or dense."""
    if isinstance(grad, LazyGradient):
        return grad._terms

    def dense(product: LogitProduct, needs: Needs, into: LogitGradients | None) -> LogitGradients:
        into = into or LogitGradients(product, needs)
        into.add(product.cast(), slice(None), grad.reshape(-1, grad.shape[-1]).to(product.dtype))
        return into

    return (dense,)


def _loss(
    func: Callable[..., Tensor],
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` or `F.nll_loss` with class indices as targets."""
    if not (size_average is None and reduce is None and reduction in ("mean", "sum", "none")):
        return NotImplemented
    if not are_classes_of(logits, logits._axis, target, weight):
        return NotImplemented
    flat = target.reshape(-1)
    options = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}

    def number(chunk: Tensor, part: slice) -> Tensor:
        return func(chunk, flat[part], weight, ignore_index=ignore_index, reduction="none", **options)

    reading = _reading(logits, number)
    if reduction == "none":
        return _row_numbers(logits, reading).view(target.shape)
    divisor = _divisor(flat, weight, ignore_index) if reduction == "mean" else None
    takes_gradients = logits.requires_grad and torch.is_grad_enabled()
    if takes_gradients and logits._head.product.dtype != torch.float16:
        return _Total.apply(logits, reading, divisor)  # type: ignore[no-untyped-call]
    return _divided(_row_numbers(logits, reading), divisor)


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean over targets that count, as in `F.cross_entropy`."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0.0).sum()


def _over_classes(func: Callable[..., Tensor], logits: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if not isinstance(dim, int) or dim % logits.dim() != logits._axis:
        return NotImplemented
    reading = _reading(logits, lambda chunk, _: func(chunk, -1))
    has_gradients = func is not torch.argmax
    values = _row_numbers(logits, reading) if has_gradients else numbers(logits._head.read(), reading)
    return _shaped(logits, values, keepdim)


def _gather(logits: Any, dim: int, index: Tensor) -> Any:
    """`torch.gather` of one logit of each row."""
    sizes = [1 if axis == logits._axis else size for axis, size in enumerate(logits.shape)]
    if dim % logits.dim() != logits._axis or list(index.shape) != sizes:
        return NotImplemented
    flat = index.reshape(-1, 1)
    values = _row_numbers(logits, _reading(logits, lambda chunk, part: chunk.gather(-1, flat[part]).squeeze(-1)))
    return _shaped(logits, values, keepdim=True)


def _shaped(logits: Any, values: Tensor, keepdim: bool) -> Tensor:
    sizes = list(logits.shape)
    sizes[logits._axis : logits._axis + 1] = [1] if keepdim else []
    return values.view(sizes)


NUMBERS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: partial(_loss, F.cross_entropy),
    F.nll_loss: partial(_loss, F.nll_loss),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), partial(_over_classes, torch.logsumexp)),
    **dict.fromkeys((torch.argmax, Tensor.argmax), partial(_over_classes, torch.argmax)),
    **dict.fromkeys((torch.gather, Tensor.gather), _gather),
}
"""torch's functions that take one number of each row → their versions for lazy logits."""


def _reading(logits: Any, number: Callable[[Tensor, slice], Tensor]) -> Reading:
    """The reading of each row of `logits`, under the current autocast state."""
    kind, ops = logits.device.type, logits._ops
    is_autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def of_product(chunk: Tensor, part: slice) -> Tensor:
        for op in ops:
            chunk = op(chunk)
        with torch.autocast(kind, dtype, enabled=is_autocast):
            return number(chunk, part)

    return Reading(logits._rows.select(logits._axis, 0).reshape(-1), of_product)


def _row_numbers(logits: Any, reading: Reading) -> Tensor:
    return _Each.apply(logits, reading)  # type: ignore[no-any-return, no-untyped-call]


class _Each(torch.autograd.Function):
    """A number of each row; backward computes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, logits: Any, reading: Reading) -> Tensor:
        ctx.like, ctx.reading = Like.of(logits), reading
        return numbers(logits._head.read(), reading)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        reading = ctx.reading

        def recompute(product: LogitProduct, needs: Needs, into: LogitGradients | None) -> LogitGradients:
            into = into or LogitGradients(product, needs)
            add_gradients(product, reading, grad, into)
            return into

        return LazyGradient(ctx.like, (recompute,)), None


class _Total(torch.autograd.Function):
    """The sum of all rows' numbers over `divisor`; forward computes the gradients too."""

    @staticmethod
    def forward(ctx: Any, logits: Any, reading: Reading, divisor: Tensor | None) -> Tensor:
        product = logits._head.read()
        ctx.gradients, ctx.divisor, ctx.like = LogitGradients(product, logits._head.needs), divisor, Like.of(logits)
        return _divided(add_gradients(product, reading, None, ctx.gradients), divisor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.divisor is not None:  # if no row counts, the loss is NaN and gradients are 0
            grad = torch.where(ctx.divisor == 0, 0.0, grad / ctx.divisor)
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        gradients: LogitGradients = ctx.gradients
        if is_last:
            ctx.gradients = None

        def term(product: LogitProduct, needs: Needs, into: LogitGradients | None) -> LogitGradients:
            if into is None and is_last:
                return gradients.scaled_(grad)
            into = into or LogitGradients(product, needs)
            return into.plus_(gradients, grad)

        return LazyGradient(ctx.like, (term,)), None, None


def _divided(values: Tensor, divisor: Tensor | None) -> Tensor:
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return (total if divisor is None else total / divisor).to(values.dtype)
