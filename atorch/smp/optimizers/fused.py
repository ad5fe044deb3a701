"""The base of both optimizers: groups, steps, the choice of a kernel, and buckets of parameters."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from atorch.errors import ArgumentError, shown
from atorch.logs import say_once
from atorch.model.pytree import local_part
from atorch.runtime.gradients.clip import Spread, local_grad

Betas = tuple[float, float]
Tensors = list[Tensor]
_HALVES = (torch.float16, torch.bfloat16)


class Kernels(NamedTuple):
    """apex's kernels, and the function that applies one to lists of tensors."""

    apply: Callable[..., Any]
    lamb: Any
    novograd: Any


@dataclass(frozen=True)
class TensorBucket:
    """Parameters with gradients, of one device and dtype (`whose`), and their local parts as plain tensors."""

    whose: list[Tensor]
    parameters: list[Tensor]
    gradients: list[Tensor]

    def state(self, optimizer: Optimizer, name: str) -> list[Tensor]:
        return [local_part(optimizer.state[parameter][name]) for parameter in self.whose]

    @property
    def kind(self) -> tuple[str, torch.dtype]:
        return self.parameters[0].device.type, self.parameters[0].dtype


class Fused(Optimizer):
    """The base of both optimizers: counts steps by group, and drops or zeroes gradients."""

    spread: Spread = Spread()
    """The distribution of the model over processes; set it before the first step."""
    set_grad_none: bool
    _modes: tuple[str, ...] = ("set_grad_none",)

    def __init__(self, params: Any, defaults: dict[str, Any], amsgrad: bool, set_grad_none: bool) -> None:
        name = type(self).__name__
        if amsgrad:
            raise ArgumentError(f"{name} was given amsgrad=True; there is no AMSGrad variant of it: leave amsgrad out")
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def __getstate__(self) -> dict[str, Any]:
        # torch's `Optimizer.__getstate__` omits attributes outside the groups.
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._modes}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose steps are counted from its first one.

        Raises:
            ArgumentError: a setting of the group is invalid.
        """
        super().add_param_group(param_group)
        try:
            _check(type(self).__name__, self.param_groups[-1])
        except ArgumentError:
            del self.param_groups[-1]
            raise

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; `set_to_none` defaults to the constructor's `set_grad_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one step; returns the result of `closure`, which recomputes the loss and its gradients.

        Raises:
            ArgumentError: a gradient is sparse, or a parameter is not floating-point.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                _check_kind(type(self).__name__, parameter)
        self._begin()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for bucket in self._buckets(group):
                kernels = self._kernels_for(bucket)
                if kernels is None:
                    self._step(group, bucket)
                else:
                    self._kernel_step(kernels, group, bucket)
        return loss

    def _begin(self) -> None:
        """Compute what a step needs from all groups together."""

    def _step(self, group: dict[str, Any], bucket: TensorBucket) -> None:
        moments = bucket.state(self, "exp_avg")
        parameters, means = wide(bucket.parameters), wide(moments)
        updates = self._updates(group, bucket, parameters, means, wide(bucket.gradients))
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(parameters, updates)
        write(bucket.parameters, parameters)
        write(moments, means)

    def _updates(
        self, group: dict[str, Any], bucket: TensorBucket, parameters: Tensors, means: Tensors, gradients: Tensors
    ) -> Tensors:
        """The amounts to subtract from the parameters at a learning rate of 1; changes `means`, never the gradients."""
        raise NotImplementedError

    def _kernel_step(self, kernels: Kernels, group: dict[str, Any], bucket: TensorBucket) -> None:
        raise NotImplementedError

    def _buckets(self, group: dict[str, Any]) -> Iterator[TensorBucket]:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for parameters in kinds.values():
            for parameter in parameters:
                self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            yield TensorBucket(parameters, list(map(local_part, parameters)), list(map(local_grad, parameters)))

    def _kernels_for(self, bucket: TensorBucket) -> Kernels | None:
        """apex's kernels if they can step these parameters; else None, and the reason is logged once."""
        name = type(self).__name__
        device, dtype = bucket.kind
        if device != "cuda":
            say_once(f"smp.optimizers.{name} steps by torch's operations on {device}; apex's kernel is for CUDA")
            return None
        if dtype not in (torch.float32, torch.float16):
            say_once(f"smp.optimizers.{name} steps {dtype} parameters by torch's operations; apex's kernel has none")
            return None
        if any(self.spread.groups_of(parameter) for parameter in bucket.whose):
            say_once(f"smp.optimizers.{name} steps by torch's operations where processes share parameters")
            return None
        kernels = _kernels()
        if kernels is None:
            say_once(
                f"smp.optimizers.{name} steps by torch's operations, which is right and slower than apex's kernel: "
                "apex is not installed, or without its CUDA extensions (build NVIDIA's from its repository)",
                logging.WARNING,
            )
        return kernels


def _kernels() -> Kernels | None:
    """apex's kernels; None if apex or its CUDA extensions are not installed."""
    try:
        extension = importlib.import_module("amp_C")
        apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    except ImportError:
        return None
    return Kernels(apply, extension.multi_tensor_lamb, extension.multi_tensor_novograd)


def _check(name: str, group: dict[str, Any]) -> None:
    rules: list[tuple[str, Callable[[Any], bool], str]] = [
        ("lr", lambda given: given >= 0, "at least 0"),
        (
            "betas",
            lambda given: len(given) == 2 and all(0 <= beta < 1 for beta in given),
            "two numbers from 0 to below 1",
        ),
        ("eps", lambda given: given >= 0, "at least 0"),
        ("weight_decay", lambda given: given >= 0, "at least 0"),
        ("norm_type", lambda given: given in (0, 2), "2, or 0 for the largest absolute value"),
    ]
    for setting, holds, rule in rules:
        if setting in group and not holds(group[setting]):
            raise ArgumentError(f"{name} was given {shown(group[setting])} as {setting}; it is {rule}")


def _check_kind(name: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        raise ArgumentError(
            f"{name} was given a sparse gradient of a parameter of shape {tuple(parameter.shape)}; use sparse=False in "
            "the embedding, or torch.optim.SparseAdam for it"
        )
    if not parameter.is_floating_point():
        raise ArgumentError(f"{name} was given a parameter of {parameter.dtype}; it steps floating-point numbers")


def corrections(group: dict[str, Any]) -> Betas:
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


def settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of a group that apex's kernels take, in the kernels' order."""
    adam = (group["lr"], *group["betas"], group["eps"], group["step"], int(group["bias_correction"]))
    return *adam, group["weight_decay"], int(group["grad_averaging"])


def add_to_means(means: Tensors, gradients: Tensors, group: dict[str, Any]) -> None:
    beta1 = group["betas"][0]
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)


def wide(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors, or fp32 copies of 16-bit ones."""
    return [tensor.float() for tensor in tensors] if tensors[0].dtype in _HALVES else tensors


def write(targets: list[Tensor], results: list[Tensor]) -> None:
    if targets[0] is not results[0]:
        torch._foreach_copy_(targets, results)
