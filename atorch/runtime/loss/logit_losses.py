"""Losses of lazy logits: one number a row, and the gradients, by chunks of rows; one chunk's logits exist at a time.

Logits are hidden states, one row for each token, times a weight with a row for each class. Of each chunk, numbers and
gradients are computed, then the logits are dropped (Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, section 3.2).

A loss that is one number of all rows takes its gradients in forward. In fp16 they need the loss scale, or they vanish.
There, and where every row has a gradient of its own, backward computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.runtime.tensor_parallel.split_loss import are_classes_of


@dataclass(frozen=True)
class LogitProduct:
    """`hidden @ weight.T + bias` in `dtype`, not computed yet; operands are detached."""

    hidden: Tensor  # (rows, features)
    weight: Tensor  # (classes, features)
    bias: Tensor | None
    dtype: torch.dtype
    chunk: int  # rows whose logits exist at once

    def logits(self, rows: Tensor | slice) -> Tensor:
        """The logits of some rows, (rows, classes)."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return F.linear(self.hidden[rows].to(self.dtype), self.weight.to(self.dtype), self.cast_bias())

    def cast_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.to(self.dtype)

    def cast(self) -> LogitProduct:
        """The same with a weight that is cast once, for many chunks."""
        return replace(self, weight=self.weight.to(self.dtype), bias=self.cast_bias())


@dataclass(frozen=True)
class Reading:
    """A function that takes one number of each row of logits, and the rows to take."""

    rows: Tensor  # (n,), row numbers of the product
    number: Callable[[Tensor, slice], Tensor]  # (logits of a slice of the n rows, the slice) → their numbers


class Needs(NamedTuple):
    """Operands of a product that need gradients."""

    hidden: bool
    weight: bool
    bias: bool


@dataclass(frozen=True)
class Head:
    """A product, and the versions that its operands must still have when logits are read."""

    product: LogitProduct
    needs: Needs
    versions: tuple[int, ...]

    def read(self) -> LogitProduct:
        """The product, if its operands still have the values of the forward pass.

        Raises:
            ArgumentError: an operand was changed or freed.
        """
        weight = self.product.weight
        is_freed = not weight.untyped_storage().nbytes() and weight.numel()
        if is_freed or versions_of(self.product) != self.versions:
            raise ArgumentError(
                "logits are read after the weight or the hidden states that they are computed of have changed or were "
                "freed. An optimizer's step changes them; fsdp frees groups that its arguments name. Read the logits "
                "before, or leave cross_entropy out"
            )
        return self.product


def versions_of(product: LogitProduct) -> tuple[int, ...]:
    tensors = (product.hidden, product.weight, product.bias)
    return tuple(tensor._version for tensor in tensors if tensor is not None and not tensor.is_inference())


class LogitGradients:
    """Gradients of a product's operands, accumulated from those of logits."""

    def __init__(self, product: LogitProduct, needs: Needs) -> None:
        hidden, weight, bias = product.hidden, product.weight, product.bias
        self.hidden = torch.zeros_like(hidden) if needs.hidden else None
        self.weight = torch.zeros_like(weight, dtype=_wide(weight)) if needs.weight else None
        self.bias = None if bias is None or not needs.bias else torch.zeros_like(bias, dtype=_wide(bias))

    def add(self, product: LogitProduct, rows: Tensor | slice, grad: Tensor) -> None:
        """Add the contribution of some rows' logit gradients, (rows, classes); `product` is one that was cast."""
        with torch.autocast(grad.device.type, enabled=False):
            if self.hidden is not None:
                of_hidden = (grad @ product.weight).to(self.hidden.dtype)
                if isinstance(rows, slice):
                    self.hidden[rows] += of_hidden
                else:
                    self.hidden.index_add_(0, rows, of_hidden)
            if self.weight is not None:
                hidden = product.hidden[rows].to(product.dtype)
                if self.weight.dtype == product.dtype:
                    self.weight.addmm_(grad.t(), hidden)
                else:
                    self.weight += grad.t() @ hidden
            if self.bias is not None:
                self.bias += grad.sum(0, dtype=self.bias.dtype)

    def plus_(self, other: LogitGradients, factor: Tensor) -> LogitGradients:
        """Add `factor` times `other` in place, and return self."""
        for gradient, addend in zip(self._all(), other._all(), strict=True):
            if gradient is not None and addend is not None:
                gradient += addend * factor.to(addend.dtype)
        return self

    def scaled_(self, factor: Tensor) -> LogitGradients:
        """Multiply by `factor` in place, and return self."""
        for gradient in self._all():
            if gradient is not None:
                gradient *= factor.to(gradient.dtype)
        return self

    def _all(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias


def numbers(product: LogitProduct, reading: Reading) -> Tensor:
    """The number of each row, (n,), detached."""
    product = product.cast()
    with torch.no_grad():
        return torch.cat(
            [reading.number(product.logits(reading.rows[chunk]), chunk) for chunk in _chunks(product, reading)]
        )


def add_gradients(product: LogitProduct, reading: Reading, grads: Tensor | None, into: LogitGradients) -> Tensor:
    """The numbers, (n,); adds the operands' gradients to `into`, for `grads`, (n,), or ones, of the numbers."""
    product, results = product.cast(), []
    for chunk in _chunks(product, reading):
        rows = reading.rows[chunk]
        logits = product.logits(rows).requires_grad_()
        with torch.enable_grad():
            number = reading.number(logits, chunk)
        of_number = torch.ones_like(number) if grads is None else grads[chunk].to(number.dtype)
        (grad,) = torch.autograd.grad(number, logits, of_number)
        results.append(number.detach())
        del logits, number  # free a chunk's before the next one's are computed
        into.add(product, rows, grad)
        del grad
    return torch.cat(results)


def _chunks(product: LogitProduct, reading: Reading) -> Iterator[slice]:
    total = reading.rows.shape[0]
    for start in range(0, max(total, 1), product.chunk):
        yield slice(start, min(start + product.chunk, total))


def _wide(operand: Tensor) -> torch.dtype:
    """The dtype for sums of many chunks: fp32 or wider."""
    return torch.promote_types(operand.dtype, torch.float32)


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
    is_plain = size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not (is_plain and are_classes_of(logits, logits._axis, target, weight)):
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
    return kept.sum() if weight is None else weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0.0).sum()


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
