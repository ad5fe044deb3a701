"""Deferred outputs, and gradients that are handed over later.

If a step runs in pieces (micro-batches, pipeline stages), forward and backward of the pieces alternate. Both run inside
the loss function, since only there batch, inputs and loss are all known. So the model returns a Deferred, and the loss
function runs the pieces with separate gradients. `loss.backward()` adds these to `.grad`, times the incoming gradient.
So accumulation over calls, `loss / n` and clipping work as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.model.pytree import map_tensors
from atorch.model.user_functions import value_of, with_value
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.gradients.backward import (
    can_be_reached,
    is_asked,
    is_captured,
    postpone,
    postponed,
    refuse_second_order,
)
from atorch.runtime.optimizer.wrapped_optimizer import local


class MicroBatchGradients(list[tuple[torch.Tensor, torch.Tensor]]):
    """A list to which there are weak references."""


_MISUSE = (
    "the model's output is computed piece by piece inside loss_func, so it can only be given to loss_func(batch, "
    "output) of the same result. Read outputs inside your loss function, or call the model "
    "under torch.no_grad()"
)


def _misused(*args: Any, **kwargs: Any) -> Any:
    raise TypeError(_MISUSE)


class Deferred:
    """The output of `model(*args, **kwargs)`, to be computed by the loss function. Other uses raise TypeError."""

    __slots__ = ("_args", "_kwargs", "_model")

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs

    def call(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        return self._model, self._args, self._kwargs

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, as hasattr, copy and inspect need it.
        raise AttributeError(f"{name!r}: {_MISUSE}")

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __float__ = __int__ = _misused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _misused
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _misused
    __torch_function__ = classmethod(_misused)


@contextmanager
def separate_gradients(parameters: Sequence[torch.Tensor], *, reused: bool = False) -> Iterator[MicroBatchGradients]:
    """Inside, every `.grad` starts as None. Afterwards `.grad` is restored, and the list has the gradients from inside.

    If the body raises, its gradients are dropped. `reused`: the body overwrites the memory of earlier gradients.
    """
    before = [parameter.grad for parameter in parameters]
    if reused:
        before = [None if gradient is None else gradient.clone() for gradient in before]
    for parameter in parameters:
        parameter.grad = None
    gradients = MicroBatchGradients()
    try:
        yield gradients
        for parameter, earlier in zip(parameters, before, strict=True):
            if (made := parameter.grad) is not None:
                # The restored gradient takes the new one's place in that memory.
                gradients.append((parameter, made.clone() if reused and earlier is not None else made))
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


class SeparateGradients:
    """The gradients of successive calls, separate from `.grad` until the loss of each call hands them over."""

    def __init__(self, parameters: Sequence[torch.Tensor], reductions: Sequence[GradientSync]) -> None:
        self._parameters, self._reductions = parameters, reductions
        # The gradients of the last call, while its loss is alive.
        self._waiting: weakref.ref[MicroBatchGradients] = weakref.ref(MicroBatchGradients())
        self.is_open = False  # true while a call computes gradients

    @contextmanager
    def gradients(self) -> Iterator[MicroBatchGradients]:
        """As `separate_gradients`; also empties the reductions' buckets, and recovers the reductions on an error."""
        postpone(self._parameters, lambda hook, parameter: None)  # until `deposit`
        reused = any(reduction.reuses_gradients for reduction in self._reductions)
        waiting = self._waiting()
        if reused and waiting is not None:
            # The next reduction overwrites their memory.
            waiting[:] = [(parameter, gradient.clone()) for parameter, gradient in waiting]
        done, self.is_open = False, True
        try:
            with separate_gradients(self._parameters, reused=reused) as gradients:
                yield gradients
            done = True
        finally:
            self.is_open = False
            if not done:
                for reduction in self._reductions:
                    reduction.recover()
        self._waiting = weakref.ref(gradients)


def deposit(loss: torch.Tensor, gradients: MicroBatchGradients) -> torch.Tensor:
    """`loss`, whose backward adds `gradients` times the incoming gradient to `.grad`, once per parameter.

    With `inputs=…` it does so only for these, and `torch.autograd.grad` returns them instead.
    """
    places = [place for place, (parameter, _) in enumerate(gradients) if can_be_reached(parameter)]
    reached = [gradients[place][0] for place in places]
    leaf = loss.detach().requires_grad_()
    return _Deposit.apply(leaf, gradients, places, *reached)  # type: ignore[no-any-return, no-untyped-call]


def deposit_loss(loss: Any, gradients: MicroBatchGradients) -> Any:
    """A loss whose scalar hands the gradients over; backward of its other tensors raises ArgumentError."""
    value = value_of(loss)
    return with_value(loss if loss is value else map_tensors(_refusing_backward, loss), deposit(value, gradients))


def _refusing_backward(leaf: torch.Tensor) -> Any:
    if not leaf.is_floating_point():
        return leaf
    return _Aside.apply(leaf, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]


class _Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ArgumentError(
            "backward was called on another item of what loss_func returned than the first. Under micro_batch and "
            "pipeline_parallel gradients are only those of the first; add the losses up in loss_func, or leave "
            "micro_batch and pipeline_parallel out"
        )


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: MicroBatchGradients, places: Sequence[int], *_: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients, ctx.places, ctx.gone = gradients, places, set()
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_second_order("losses that are computed piece by piece (micro_batch, pipeline_parallel)")
        (whole, _), *edges = ctx.next_functions
        reached = dict(zip(ctx.places, (accumulator for accumulator, _ in edges), strict=True))
        asked: Sequence[int] = range(len(ctx.gradients))
        if not is_asked(whole):
            asked = [place for place, accumulator in reached.items() if is_asked(accumulator)]
        if not ctx.gone.isdisjoint(asked) or (not asked and ctx.gone):
            raise RuntimeError("backward ran a second time through this loss; call loss_func again for a new one")
        ctx.gone.update(asked)
        captured = {place for place in asked if place in reached and is_captured(reached[place])}
        returned: dict[int, torch.Tensor] = {}
        handed = [(place, *ctx.gradients[place]) for place in asked]
        handed = [(place, p, grad.coalesce() if grad.is_sparse else grad) for place, p, grad in handed]
        handed = [(place, p, grad.clone() if place in captured else grad) for place, p, grad in handed]
        _multiply([grad for _, _, grad in handed], factor)
        for place, parameter, gradient in handed:
            if place in captured:
                returned[place] = gradient
            else:
                hooks = postponed(parameter)
                for hook in [registered for registered in hooks if registered.takes_gradient]:
                    gradient = hook.changed(gradient)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                for hook in [registered for registered in hooks if not registered.takes_gradient]:
                    hook.hook(parameter)
        if len(ctx.gone) == len(ctx.gradients):
            ctx.gradients = ()
        return None, None, None, *(returned.get(place) for place in ctx.places)


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    if factor.device.type == "cpu" and factor.item() == 1.0:  # reading it on a device would wait
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in map(local, gradients):
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), values in kinds.items():
        if dtype == factor.dtype:
            torch._foreach_mul_(values, factor.to(device))
        else:  # a Python number, so that it is not rounded to 16 bits first
            torch._foreach_mul_(values, factor.item())
