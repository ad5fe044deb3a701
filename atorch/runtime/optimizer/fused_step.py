"""torch's fused kernels for optimizers that were made without saying how to step: one pass instead of a dozen.

An optimizer whose user gave neither `fused` nor `foreach` takes the kernel that torch has for its parameters; results
differ by rounding alone. The kernels walk through memory: a CPU's gives wrong numbers, without a word, where a
gradient or a state lies in another order than its parameter, and none takes sparse gradients. So each step looks first:
a group that has come by such steps as torch does by default from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from atorch.logs import logger
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer

_KINDS = (Adam, AdamW, SGD, Adagrad)


def fuse(optimizer: Any) -> None:
    """Let groups of torch's optimizers step by fused kernels, where there are some and the user did not choose.

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
        optimizer.register_step_pre_hook(_keep_to_what_fits)
        optimizer.register_load_state_dict_pre_hook(_keep_way)


def fused_by_default(optimizer: Any) -> str | None:
    """The class of an optimizer, or of the one inside it, that steps by a kernel that `fuse` chose; None for others."""
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    chosen = _keep_to_what_fits in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return type(optimizer).__name__ if chosen and any(group["fused"] for group in optimizer.param_groups) else None


def _can_fuse(kind: type[Any], group: Mapping[str, Any]) -> bool:
    """True if a kernel takes such parameters beside each other, with the group's settings."""
    if group["fused"] is not None or group["foreach"] is not None or group["differentiable"]:
        return False
    samples = {(type(each), _held(each).device, each.dtype, _mesh(each)): each for each in group["params"]}
    are_alike = len({_mesh(each) for each in samples.values()}) <= 1  # a list of DTensors has them alone
    return are_alike and all(_takes(kind, each, group) for each in samples.values())


def _takes(kind: type[Any], like: Tensor, group: Mapping[str, Any]) -> bool:
    """True if torch has a kernel for such a parameter that gives the right numbers, which a small one tells.

    Kernels differ by device, dtype and torch; up to torch 2.13 that of SGD on CPUs left 16-bit parameters as they were.
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
    except (RuntimeError, AssertionError, TypeError, ValueError):  # of a torch without that kernel, or that device
        return False


def _stepped(kind: type[Any], like: Tensor, group: Mapping[str, Any], is_fused: bool | None) -> Tensor:
    """A small parameter like `like` after a few large steps; of a DTensor what this process holds."""
    ramp = _ramp(like)
    parameter = nn.Parameter(_spread(ramp.clone(), like))
    optimizer: Optimizer = kind([parameter])
    lr = torch.full_like(group["lr"], 0.5) if isinstance(group["lr"], Tensor) else 0.5
    optimizer.param_groups[0].update({**group, "params": [parameter], "lr": lr, "fused": is_fused})
    if is_fused:
        _place_step(optimizer.state.get(parameter, {}), parameter)
    for turn in range(3):
        parameter.grad = _spread((ramp * 7 + turn).sin(), like)
        optimizer.step()
    held: Tensor = _held(parameter).detach()
    return held


def _ramp(like: Tensor) -> Tensor:
    """Numbers from 0 to 1, enough for vectors and for what is left over."""
    ones: Tensor = _held(like).detach().new_ones(67, 67)
    return ones.tril().sum(1) / 67  # a cumulative sum is refused where algorithms are to be deterministic


def _spread(values: Tensor, like: Any) -> Tensor:
    if _mesh(like) is None:
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(values, like.device_mesh, like.placements, run_check=False)


def _keep_to_what_fits(optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a step: no kernel for groups of which something lies as kernels do not expect it."""
    has_closure = any(each is not None for each in (*args[1:], *kwargs.values()))  # whose gradients are not there yet
    with torch._C.DisableTorchFunctionSubclass():  # what guards gradients
        for group in optimizer.param_groups:
            if group["fused"] and (has_closure or not _fit(group, optimizer.state)):
                group["fused"] = None
                logger.info(
                    "%s steps without its fused kernel from now on: there is a closure, or a gradient that is sparse, "
                    "of another order or dtype than its parameter, or under momentum the first of its parameter",
                    type(optimizer).__name__,
                )


def _fit(group: Mapping[str, Any], states: Mapping[Any, Any]) -> bool:
    if group.get("momentum") and len({bool(states.get(p)) for p in group["params"] if p.grad is not None}) > 1:
        return False  # the kernel begins with all momenta at once
    return all(_fits(each, states) for each in group["params"])


def _fits(parameter: Any, states: Mapping[Any, Any]) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return True
    held = _held(parameter)
    if not held.is_contiguous() and torch.empty_like(held, device="meta").stride() != held.stride():
        return False  # it has gaps
    if not _lies_as(held, _held(gradient)):
        return False
    for state in states.get(parameter, {}).values():
        if isinstance(state, Tensor) and state.dim() and not _lies_as(held, _held(state)):
            return False
    return True


def _lies_as(held: Tensor, other: Tensor) -> bool:
    if other.layout is not torch.strided or other.dtype != held.dtype:
        return False
    return (other.is_contiguous() and held.is_contiguous()) or other.stride() == held.stride()


def _keep_way(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """A state that is loaded, of an optimizer that steps in another way, for this one."""
    groups = [
        {**theirs, "fused": mine["fused"], "foreach": mine["foreach"]}
        for theirs, mine in zip(saved["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**saved, "param_groups": [*groups, *saved["param_groups"][len(groups) :]]}


def _place_step(state: dict[str, Any], parameter: Tensor) -> None:
    """Put a number of steps where a kernel reads it."""
    if isinstance(state.get("step"), Tensor):
        state["step"] = state["step"].to(parameter.device, torch.float32)


def _held(tensor: Any) -> Any:
    """The part of a DTensor that this process holds; anything else itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if hasattr(tensor, "placements") else None
