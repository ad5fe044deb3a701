"""Gradients that refuse to have their norm taken where it would be another one than plain training's.

torch.nn.utils.clip_grad_norm_ takes the norm of what it is given: of one stage of a pipeline, of parts of split
parameters, of gradients that a loss scale multiplies. Training would go on with other gradients than are meant, and
nothing would say so. `__torch_function__` sees this on gradients of the classes below, and leaves all else to torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atorch.errors import ArgumentError
from atorch.runtime.asked import expects_none

_TENSOR: Any = Tensor
_REDUCTIONS = "norm sum mean max min amax amin var std prod argmax argmin median dot"
OF_ALL_GRADIENTS = frozenset([torch._foreach_norm, torch.linalg.vector_norm])
"""What torch.nn.utils.clip_grad_norm_ calls."""
OF_ALL_ELEMENTS = OF_ALL_GRADIENTS | {
    *(getattr(owner, name) for owner in (_TENSOR, torch) for name in _REDUCTIONS.split()),
    torch.linalg.norm,
    torch.linalg.matrix_norm,
}


class _Guarded:
    """What is the same of the classes below, which are a gradient's own with nothing added."""

    __slots__ = ()
    of_parameter: str
    why: str  # what makes it another than plain training has, or not all of it
    refused: frozenset[Any]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on the gradient.

        Raises:
            ArgumentError: it would not be of the gradients that plain training has.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_ALL_ELEMENTS:
                first = next(iter((*args, *(kwargs or {}).values())))
                for each in first if isinstance(first, (list, tuple)) else (first,):
                    if isinstance(each, _Guarded) and func in each.refused:
                        raise ArgumentError(
                            f"the gradient of {each.of_parameter} {each.why}, so that {func.__name__} does not give "
                            "plain training's norm; clip with atorch.clip_grad_norm(model, max_norm), which does, and "
                            "returns it"
                        )
            return func(*args, **({} if kwargs is None else kwargs))


class GuardedGradient(_Guarded, Tensor):
    """A plain tensor otherwise."""


class GuardedShard(_Guarded, DTensor):
    """A DTensor otherwise."""

    __slots__ = ()


_GUARDED: Mapping[type, type] = {Tensor: GuardedGradient, DTensor: GuardedShard}


def guarded(gradient: Tensor, name: str, why: str, refused: frozenset[Any]) -> Tensor:
    """The same gradient, of the parameter `name`, that refuses functions; one of another class is left alone."""
    kind = _GUARDED.get(type(gradient))
    if kind is not None:
        gradient.__class__ = kind
        gradient.of_parameter, gradient.why, gradient.refused = name, why, refused  # type: ignore[attr-defined]
    return gradient


def guard_gradients(model: nn.Module, why: str) -> None:
    """Let gradients that backward passes will make refuse the norm of all, as clipping by torch's function takes it.

    Of the first and the last parameter: one that is among those that are clipped will do.
    """
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    for name, parameter in dict([*trained[:1], *trained[-1:]]).items():
        if hasattr(parameter, "guard_gradient"):  # that keeps its gradient elsewhere
            parameter.guard_gradient(why)
            continue
        parameter.register_post_accumulate_grad_hook(expects_none(partial(_guard_at_end, name, why)))


def _guard_at_end(name: str, why: str, parameter: Tensor) -> None:
    """Guard the gradient behind what else waits for the end of backward: a reduction may put another in its place."""

    def guard() -> None:
        if parameter.grad is not None:
            guarded(parameter.grad, name, why, OF_ALL_GRADIENTS)

    queue: Any = torch.autograd.Variable._execution_engine
    queue.queue_callback(lambda: queue.queue_callback(guard))
