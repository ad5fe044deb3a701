"""First-order gradients only: for functions that communicate, or whose inputs backward frees."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atorch.errors import ArgumentError

Map = Callable[[Tensor], Tensor]


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make `backward` of a communicating autograd function raise a clear error for second-order gradients."""
    once = once_differentiable(backward)

    @wraps(backward)
    def named(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling():
            refuse_second_order("what is split over processes (tensor, sequence, context)")
        return once(ctx, *grads)

    return named


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.map = backward
        return forward(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.map(grad), None, None


def mapped(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """`forward(x)`; `backward` maps its gradient to that of `x`, to first order only."""
    result: Tensor = _Both.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def refuse_transforms(*_: Any) -> None:
    """As a forward pre-hook, raise if a sharded model is called within torch.func's transforms."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ArgumentError(
            "a model of which processes hold parts was called within torch.func (grad, vmap, jvp), which sees one part "
            "alone; train with ddp or zero1, or use torch.func within the model's forward"
        )


def refuse_second_order(under: str) -> None:
    """In a backward pass, raise if it was called with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            f"create_graph=True was given, and gradients of gradients, as a gradient penalty needs them, are beyond "
            f"{under}; train with ddp or zero1, which compute them"
        )
