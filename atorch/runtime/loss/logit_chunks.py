"""One number per row of logits, and the gradients, by chunks of rows: only one chunk's logits exist at a time.

Logits are a product: hidden states, one row for each token, times a weight with a row for each class. A loss takes one
number of each row. For each chunk, logits, numbers, and gradients of hidden states and weight are computed. Then the
logits are dropped (Hsu et al. 2024, "Liger Kernel", arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from atorch.errors import ArgumentError


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
                "logits are read after the weight or the hidden states that they are computed of have changed, as an "
                "optimizer's step changes them, or were freed, as fsdp frees groups that its arguments name. Read them "
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
