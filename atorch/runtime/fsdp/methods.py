"""Methods of a sharded model that bypass its `forward`, or that visit parameters while they are gathered.

While FSDP2 has a module gathered, its parameters are not the tensors of the optimizer: `zero_grad` and
`requires_grad_` would reach only the gathered ones. And `generate` of a model within the root, as peft's models call
it, would compute with parameters of the root that are not gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from atorch.runtime.data_parallel.collective_order import CollectiveEvent
from atorch.runtime.fsdp.module_state import drop_unsharded_gradient, groups_of

if TYPE_CHECKING:
    from atorch.runtime.fsdp.collectives import FsdpPasses

GENERATES = CollectiveEvent("begins to generate")


def keep_methods(root: nn.Module, passes: FsdpPasses | None) -> None:
    """Make `zero_grad`, `requires_grad_` and `generate` of a sharded model's modules work as on plain ones.

    passes: the object that compares the passes of ranks; None on a single rank.
    """
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    sharded: list[Any] = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            sharded += [fsdp_param for group in groups_of(module) for fsdp_param in group.fsdp_params]
    sharded = list(dict.fromkeys(sharded))
    run = _Gathered(root, passes)
    owner: Any
    for owner in root.modules():
        for name, method in (("zero_grad", _zero_grad), ("requires_grad_", _requires_grad)):
            setattr(owner, name, partial(method, owner, getattr(owner, name), sharded))
        if callable(getattr(type(owner), "generate", None)):
            owner.generate = run.generating(owner.generate, several=passes is not None)
    root._run_gathered = run.call  # type: ignore[assignment]
    register_fsdp_forward_method(root, "_run_gathered")


def _zero_grad(module: nn.Module, inner: Callable[..., Any], sharded: list[Any], set_to_none: bool = True) -> None:
    inner(set_to_none)
    for fsdp_param in _inside(module, sharded):
        drop_unsharded_gradient(fsdp_param)
        gradient = fsdp_param.sharded_param.grad
        if gradient is not None and set_to_none:
            fsdp_param.sharded_param.grad = None
        elif gradient is not None:
            gradient.detach_().zero_()


def _requires_grad(
    module: nn.Module, inner: Callable[..., Any], sharded: list[Any], requires_grad: bool = True
) -> nn.Module:
    inner(requires_grad)
    for fsdp_param in _inside(module, sharded):
        fsdp_param.sharded_param.requires_grad_(requires_grad)
    return module


def _inside(module: nn.Module, sharded: list[Any]) -> list[Any]:
    inside = set(module.modules())
    places = [(fsdp_param, fsdp_param._module_info) for fsdp_param in sharded]
    return [fsdp_param for fsdp_param, at in places if not inside.isdisjoint((at.module, *at.shared_modules))]


class _Gathered:
    """Runs methods other than the root's `forward` with the root's parameters gathered."""

    def __init__(self, root: nn.Module, passes: FsdpPasses | None) -> None:
        self._root, self._passes, self._inside = root, passes, False

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method`; FSDP2 treats this as the root's forward (`register_fsdp_forward_method`)."""
        return method(*args, **kwargs)

    def generating(self, method: Callable[..., Any], *, several: bool) -> Callable[..., Any]:
        """Wrap `method` so that ranks which finish their own batch continue until all have finished."""
        accepts = "synced_gpus" in inspect.signature(method).parameters

        @wraps(method)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if accepts and several and kwargs.get("synced_gpus") is None:
                kwargs["synced_gpus"] = True
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            try:
                return self._generate(method, args, kwargs)
            finally:
                self._inside = False

        return generate

    def _generate(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.distributed.fsdp import FSDPModule

        if self._passes is not None:
            self._passes.begin(GENERATES)
        output = self._root._run_gathered(method, *args, **kwargs)  # type: ignore[operator]
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            for module in self._root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            if self._passes is not None:
                self._passes.end_without_gradients()
        return output
