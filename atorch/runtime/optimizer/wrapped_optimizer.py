"""An optimizer around another one, which learning-rate schedulers and users can treat as the inner one."""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from atorch.errors import ArgumentError


class WrappedOptimizer(Optimizer):
    """Shares the inner optimizer's parameter groups, state and defaults. Subclasses implement `step`."""

    inner: Optimizer
    copied: Collection[torch.Tensor] = ()
    """Parameters whose states belong to copies or parts of them."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        innermost = inner
        while isinstance(innermost, WrappedOptimizer):
            innermost = innermost.inner
        state = innermost.state
        super().__init__(inner.param_groups, inner.defaults)  # sets an empty state
        innermost.state = state
        self._share()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizer's state; assigning it assigns the inner one's."""
        states: Any = self.inner.state
        return _StatesOfCopies(states, self.copied) if self.copied else states  # type: ignore[return-value]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.inner.state = state

    def __getattr__(self, name: str) -> Any:
        """Attributes of the inner optimizer. Its methods may work on parameters and states, not on gradients."""
        if name == "inner" or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(self.inner, name)
        return partial(self._call, attribute) if getattr(attribute, "__self__", None) is self.inner else attribute

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that only the inner optimizer has; gradients, which may be parts or scaled, are unreadable."""
        params = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        before = [parameter.grad for parameter in params]
        for parameter, gradient in zip(params, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient.detach().as_subclass(_Unreadable)
        try:
            result = method(*args, **kwargs)
            # Chained: the gradient is None now, and was not before.
            cleared = any(p.grad is None is not gradient for p, gradient in zip(params, before, strict=True))
        finally:
            for parameter, gradient in zip(params, before, strict=True):
                parameter.grad = gradient
        if cleared:
            self.zero_grad()
        return result

    def _share(self) -> None:
        # The same objects, so that a learning rate set here is set there. Loading a state makes new ones.
        self.param_groups = self.inner.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; a group that it already has is left alone."""
        if not any(param_group is known for known in self.inner.param_groups):
            self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def gradients(self) -> Iterator[torch.Tensor]:
        """The values of all gradients that a step reads on this process, as `dense_gradient` returns them."""
        if isinstance(self.inner, WrappedOptimizer):
            yield from self.inner.gradients()
            return
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if (gradient := dense_gradient(parameter)) is not None:
                yield gradient

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def local_state_dict(self) -> dict[str, Any]:
        """This process's part of the state. No communication."""
        return self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`, or from an unwrapped inner optimizer."""
        self.inner.load_state_dict(state_dict)
        self._share()

    def _refuse(self, closure: Any) -> None:
        if closure is not None:
            raise ArgumentError(
                f"{type(self).__name__}.step was given a closure; it would see gradients of another scale or "
                "precision than the optimizer. Train in fp32, or with an optimizer that needs no closure"
            )


class _StatesOfCopies(UserDict[torch.Tensor, Any]):
    """States by the tensors that the inner optimizer steps on; the model's parameters are refused as keys."""

    def __init__(self, states: defaultdict[torch.Tensor, Any], copied: Collection[torch.Tensor]) -> None:
        self.data, self._copied = states, copied

    def __contains__(self, key: Any) -> bool:
        self._refuse(key)
        return key in self.data

    def __getitem__(self, key: torch.Tensor) -> Any:
        self._refuse(key)
        return self.data[key]

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._refuse(key)
        self.data[key] = value

    def _refuse(self, key: torch.Tensor) -> None:
        if key in self._copied:
            raise ArgumentError(
                f"the optimizer's state of a parameter of shape {tuple(key.shape)} is kept for a copy or parts of it "
                "(half, offload, chunk): read it from optim.state_dict(), change it by optim.load_state_dict()"
            )


class _Unreadable(torch.Tensor):
    """A gradient that refuses every use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ArgumentError(
            "a method of the optimizer's own reads gradients, of which this process may have a part, or scaled ones; "
            "let the loop call step() alone, or use ddp in fp32 or bf16, where the optimizer is the one that you made"
        )


def before_steps(optimizer: Optimizer | None, work: Callable[..., Any]) -> None:
    """Call `work` before each step of `optimizer`, by torch's hook, if the optimizer supports it."""
    # torch's constructor makes the dict of hooks, and a user's class may not call it.
    if optimizer is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer.register_step_pre_hook(work)


def local_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    return optimizer.local_state_dict() if isinstance(optimizer, WrappedOptimizer) else optimizer.state_dict()


def dense_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The local values of the gradient, or None; a sparse one is coalesced first."""
    if parameter.grad is None:
        return None
    if parameter.grad.is_sparse:  # summing entries of one row may overflow
        parameter.grad = parameter.grad.coalesce()
    return local(parameter.grad)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local dense values of `tensor`, sharing its memory: a DTensor's shard, or a sparse tensor's values.

    A sparse tensor must be coalesced.
    """
    if tensor.is_sparse:
        return tensor.values()
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
