"""The gradient of a head's logits, kept as functions that compute the gradients of the head's operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.runtime.loss.logit_chunks import LogitGradients, LogitProduct, Needs

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
    def __torch_dispatch__(  # type: ignore[override]  # a static method in torch's stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handle the operations of autograd itself: it adds and copies gradients."""
        if func in _SUMS and not kwargs:
            first, second = args
            return LazyGradient(Like.of(first), (*terms_of(first), *terms_of(second)))
        if func in _COPIES:
            kwargs = kwargs or {}
            return LazyGradient(
                Like.of(args[0])._replace(**{"dtype": kwargs.get("dtype") or args[0].dtype}), args[0]._terms
            )
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
