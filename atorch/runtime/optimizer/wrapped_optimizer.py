"""An optimizer around another one, which learning-rate schedulers and users can treat as the inner one; fused steps.

If the user set neither `fused` nor `foreach`, the optimizer uses torch's fused kernel: one pass instead of a dozen.
Results differ only by rounding. The kernels run linearly through memory. A CPU's silently gives wrong numbers if a
gradient or state has another memory order than its parameter, and none takes sparse gradients. So each step checks
first, and a group with such tensors uses torch's default implementation from then on.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from atorch.errors import ArgumentError, CheckpointError
from atorch.logs import logger

MASTER = "master"  # in the saved state of a parameter: its fp32 master
HAS_MASTERS = "has_masters"  # in a saved group: its trained parameters have masters
SHARE = "share"  # in a saved state: the range of elements of each flattened parameter that it is of


class WrappedOptimizer(Optimizer):
    """Shares the inner optimizer's parameter groups, state and defaults. Subclasses implement `step`."""

    inner: Optimizer

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        state = innermost(inner).state
        super().__init__(inner.param_groups, inner.defaults)  # sets an empty state
        innermost(inner).state = state
        self._share()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizer's state; assigning it assigns the inner one's."""
        return self.inner.state

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
        if not any(param_group is group for group in self.inner.param_groups):
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


class _Unreadable(torch.Tensor):
    """A gradient that refuses every use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ArgumentError(
            "a method of the optimizer's own reads gradients, of which this process may have a part, or scaled ones; "
            "let the loop call step() alone, or use ddp in fp32 or bf16, where the optimizer is the one that you made"
        )


def layers_of(optimizer: Any) -> list[Any]:
    """An optimizer, the one that it is around, and so on."""
    layers = [optimizer]
    while isinstance(layers[-1], WrappedOptimizer):
        layers.append(layers[-1].inner)
    return layers


def innermost(optimizer: Any) -> Any:
    return layers_of(optimizer)[-1]


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


class OwnPart(Tensor):
    """A tensor of a state dict that torch.distributed.checkpoint would take for the whole one, and refuses instead."""

    __slots__ = ()
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, value: Tensor, part: int | None = None) -> Tensor:
        """`value`, a part in a state dict, so that it refuses; `part`: a number of it, which files keep."""
        marked = value.detach()
        kind = cls if type(marked) is Tensor else type("OwnPart", (cls, type(marked)), {"__slots__": ()})
        marked.__class__ = kind
        vars(marked).update({} if part is None else {"part": part})
        return marked

    def __create_write_items__(self: Any, *_: Any, **__: Any) -> Any:
        raise CheckpointError(
            "torch.distributed.checkpoint would take this process's part of a tensor for the whole one, or its rows "
            "for those of another order; use atorch.save_checkpoint and load_checkpoint"
        )

    __create_chunk_list__ = __get_tensor_shard__ = __create_write_items__
    full_tensor = redistribute = new_empty = __create_write_items__  # by full_state_dict and async_save

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return OwnPart.of(self.detach().to(*args, **kwargs), vars(self).get("part"))  # by cpu_offload

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.detach()  # files and other processes have plain tensors
        vars(plain).update({"part": vars(self)["part"]} if "part" in vars(self) else {})
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return OwnPart.of(copy.deepcopy(self.detach(), memo), vars(self).get("part"))


def caller_in_torch() -> Mapping[str, Any]:
    """The variables of the function of torch.distributed.checkpoint.state_dict that calls; empty if none does.

    They say what it does with a state, and have what it leaves out of one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


_KINDS = (Adam, AdamW, SGD, Adagrad)


def fuse(optimizer: Any) -> None:
    """Let groups of torch's optimizers step by fused kernels, if there are any and the user made no choice.

    `defaults` stay as they are, and a `GradScaler` works as with any optimizer.
    """
    if type(optimizer) not in _KINDS:
        return
    groups = [group for group in optimizer.param_groups if _can_fuse(type(optimizer), group)]
    for group in groups:
        group["fused"] = True
        for parameter in group["params"]:
            _place_step(optimizer.state.get(parameter, {}), parameter)
    if groups:
        optimizer.register_step_pre_hook(_unfuse_unfit_groups)
    optimizer.register_load_state_dict_pre_hook(_keep_implementation)


def fused_by_default(optimizer: Any) -> str | None:
    """The class name of the innermost optimizer, if it uses a kernel that `fuse` chose; else None."""
    optimizer = innermost(optimizer)
    chosen = _unfuse_unfit_groups in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return type(optimizer).__name__ if chosen and any(group["fused"] for group in optimizer.param_groups) else None


def _can_fuse(kind: type[Any], group: Mapping[str, Any]) -> bool:
    """True if a kernel takes the group's parameters together, with its settings."""
    if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
        return False
    samples = {(type(p), _local(p).device, p.dtype, _mesh(p)): p for p in group["params"]}
    are_alike = len({_mesh(parameter) for parameter in samples.values()}) <= 1  # DTensors do not mix with others
    return are_alike and all(_takes(kind, parameter, group) for parameter in samples.values())


def _takes(kind: type[Any], like: Tensor, group: Mapping[str, Any]) -> bool:
    """True if torch has a correct kernel for parameters like `like`, tested on a small parameter.

    Kernels differ by device, dtype and torch version; up to torch 2.13 SGD's on CPUs left 16-bit parameters unchanged.
    """
    is_known = type(like) in (Tensor, nn.Parameter, FakeTensor) or hasattr(like, "placements")
    if not (is_known and like.is_floating_point()):
        return False
    try:
        plain, fused = (_stepped(kind, like, group, is_fused) for is_fused in (None, True))
        if isinstance(plain, FakeTensor):
            return True
        start = _ramp(like)
        return bool((fused - plain).norm() < max(1e-4, 8 * torch.finfo(like.dtype).eps) * (plain - start).norm())
    except (RuntimeError, AssertionError, TypeError, ValueError):  # torch has no kernel, or not for the device
        return False


def _stepped(kind: type[Any], like: Tensor, group: Mapping[str, Any], is_fused: bool | None) -> Tensor:
    """The local part of a small parameter like `like` after a few large steps."""
    ramp = _ramp(like)
    parameter = nn.Parameter(_spread(ramp.clone(), like))
    optimizer: Optimizer = kind([parameter])
    lr = torch.full_like(group["lr"], 0.5) if isinstance(group["lr"], Tensor) else 0.5
    optimizer.param_groups[0].update({**group, "params": [parameter], "lr": lr, "fused": is_fused})
    if is_fused:
        _place_step(optimizer.state.get(parameter, {}), parameter)
    for step in range(3):
        parameter.grad = _spread((ramp * 7 + step).sin(), like)
        optimizer.step()
    local_part: Tensor = _local(parameter).detach()
    return local_part


def _ramp(like: Tensor) -> Tensor:
    """Numbers from 0 to 1, enough for a kernel's vector loop and its remainder."""
    ones: Tensor = _local(like).detach().new_ones(67, 67)
    return ones.tril().sum(1) / 67  # cumsum raises under deterministic algorithms


def _spread(values: Tensor, like: Any) -> Tensor:
    if _mesh(like) is None:
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(values, like.device_mesh, like.placements, run_check=False)


def _unfuse_unfit_groups(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a step, turn the kernel off for groups with tensors that it does not support."""
    has_closure = any(arg is not None for arg in (*args[1:], *kwargs.values()))  # it makes the gradients only later
    with torch._C.DisableTorchFunctionSubclass():  # gradients may be guarded
        for group in optimizer.param_groups:
            if group["fused"] and (has_closure or not _group_fits(group, optimizer.state)):
                group["fused"] = None
                logger.info(
                    "%s steps without its fused kernel from now on: there is a closure, or a gradient that is sparse, "
                    "of another order or dtype than its parameter, or under momentum the first of its parameter",
                    type(optimizer).__name__,
                )


def _group_fits(group: Mapping[str, Any], states: Mapping[Any, Any]) -> bool:
    if group.get("momentum") and len({bool(states.get(p)) for p in group["params"] if p.grad is not None}) > 1:
        return False  # the kernel initializes all momenta at once
    return all(_parameter_fits(parameter, states) for parameter in group["params"])


def _parameter_fits(parameter: Any, states: Mapping[Any, Any]) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    local_part = _local(parameter)
    if not local_part.is_contiguous() and torch.empty_like(local_part, device="meta").stride() != local_part.stride():
        return False  # it has gaps
    if not _lies_as(local_part, _local(gradient)):
        return False
    for state in states.get(parameter, {}).values():
        if isinstance(state, Tensor) and state.dim() and not _lies_as(local_part, _local(state)):
            return False
    return True


def _lies_as(held: Tensor, other: Tensor) -> bool:
    if other.layout is not torch.strided or other.dtype != held.dtype:
        return False
    return (other.is_contiguous() and held.is_contiguous()) or other.stride() == held.stride()


def _keep_implementation(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Replace the implementation choices in a loaded state by those of this optimizer."""
    groups = [
        {**theirs, "fused": mine["fused"], "foreach": mine["foreach"]}
        for theirs, mine in zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**saved, "param_groups": [*groups, *saved["param_groups"][len(groups) :]]}


def _place_step(state: dict[str, Any], parameter: Tensor) -> None:
    """Move the step count to the parameter's device, where a kernel reads it."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(parameter.device, torch.float32)


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if hasattr(tensor, "placements") else None
