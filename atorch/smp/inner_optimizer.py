"""Optimizers for the parameters of the local part of a model: wrappers of the script's, and the base of the fused ones.

Wrappers from the inside out: the script's optimizer, fp32 masters of 16-bit parameters, this replica's shard of the
states, a collective check for finite gradients. Each layer is present only if it is needed.

Fused optimizers keep groups and steps, choose a kernel, and step parameters in buckets.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.distributed.collectives import all_or_none
from atorch.errors import ArgumentError, StrategyError, shown
from atorch.logs import log_once
from atorch.model.pytree import local_part
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from atorch.runtime.fsdp.sharded_access import step_as_ordinary
from atorch.runtime.fused import optional
from atorch.runtime.gradients.clip import Spread, local_grad
from atorch.runtime.optimizer.user_optimizer import ShardKind, refusal
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer
from atorch.runtime.precision.master_weights import MasterWeights, with_master_weights

ADVICE = "Use an optimizer that steps every element by its own gradient (AdamW, SGD, …), or leave {key} out"


def stepping(
    optimizer: Optimizer, *, halves: bool, values: WeakTensorKeyDictionary | None, scale: LossScale | None,
    sharing: dist.ProcessGroup | None, sharded: dist.ProcessGroup | None, device: torch.device, spread: Spread,
) -> Optimizer:  # fmt: skip
    """Wrap `optimizer` to step its current parameters. All processes call this together.

    The wrapper shares the groups of `optimizer`, so that a learning rate set there takes effect here.

    Args:
        halves: parameters are in 16 bits, and get fp32 masters.
        values: the parameters' values before rounding, by parameter.
        scale: the loss scale; a step is skipped if a gradient is not finite. None for no loss scaling.
        sharing: the replicas that shard the optimizer states.
        sharded: the replicas that shard the parameters.
        spread: the parts of the model on other processes, for optimizers that need global norms.

    Raises:
        StrategyError: the step of a parameter depends on parameters on other processes.
    """
    make: Callable[[Any], Optimizer] = partial(_copy_over, optimizer)
    wrapped = optimizer
    if sharded is not None:
        check_split(optimizer, "sharded", "sharded_data_parallel_degree", sharded)
    if halves or sharing is not None:
        groups = [dict(group) for group in optimizer.param_groups]
        make = with_master_weights(make, scale or LossScale(1.0), values) if halves else make
        if sharing is not None:
            check_split(optimizer, "apart", "shard_optimizer_state", sharing)
            wrapped = ShardedOptimizer(groups, make, sharing)
        else:
            wrapped = make(groups)
        for group, wrapped_group in zip(optimizer.param_groups, wrapped.param_groups, strict=True):
            group.update(wrapped_group)
        wrapped.param_groups[:] = optimizer.param_groups
    _set_spread(wrapped, spread)
    wrapped = wrapped if sharded is None else step_as_ordinary(wrapped)
    return wrapped if scale is None else ScaledOptimizer(wrapped, scale, unscale=not halves, device=device)


def _set_spread(optimizer: Optimizer, spread: Spread) -> None:
    """Give the innermost optimizer, which may step masters, the spread of the model over processes."""
    shadows: dict[Tensor, Tensor] = {}
    while isinstance(optimizer, WrappedOptimizer):
        if isinstance(optimizer, MasterWeights):
            shadows = optimizer.shadows
        optimizer = optimizer.inner
    if isinstance(optimizer, Fused):
        parts = {shadows.get(parameter, parameter): key for parameter, key in spread.parts.items()}
        elsewhere = {shadows.get(parameter, parameter) for parameter in spread.counted_elsewhere}
        optimizer.spread = Spread(spread.over, parts, elsewhere)


def check_split(optimizer: Optimizer, split: ShardKind, key: str, group: dist.ProcessGroup) -> None:
    """Raise StrategyError on all processes of a group if the optimizer steps a split model differently.

    key: the configuration key that splits the model.
    """

    def work() -> None:
        if (reason := refusal(optimizer, split)) is not None:
            raise StrategyError(
                f"{key} spreads what the optimizer steps over processes, which {type(optimizer).__name__} does not "
                f"bear: {reason}. {ADVICE.format(key=key)}"
            )

    all_or_none(work, group)


def _copy_over(optimizer: Optimizer, groups: Any) -> Optimizer:
    """A copy of an optimizer with its settings, without state, over these groups."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).pop("step", None)  # a scheduler's wrapper, which steps the original
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": list(group["params"])} for group in groups]
    return copy


Tensors = list[Tensor]
KernelCall = Callable[..., Any]
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TensorBucket:
    """Parameters with gradients, of one device and dtype (`whose`), and their local parts as plain tensors."""

    whose: Tensors
    parameters: Tensors
    gradients: Tensors
    means: Tensors

    @property
    def kind(self) -> tuple[str, torch.dtype]:
        return self.parameters[0].device.type, self.parameters[0].dtype


class Fused(Optimizer):
    """The base of both optimizers: counts steps by group, and drops or zeroes gradients."""

    spread: Spread = Spread()
    """The distribution of the model over processes; set it before the first step."""
    set_grad_none: bool
    _modes: tuple[str, ...] = ("set_grad_none",)
    _kernel: str  # apex's name of it

    def __init__(self, params: Any, defaults: dict[str, Any], amsgrad: bool, **modes: bool) -> None:
        if amsgrad:
            name = type(self).__name__
            raise ArgumentError(f"{name} was given amsgrad=True; there is no AMSGrad variant of it: leave amsgrad out")
        super().__init__(params, defaults)
        vars(self).update(modes)

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
        for parameter in self._parameters():
            if parameter.grad is not None:
                _check_kind(type(self).__name__, parameter)
        self._begin()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for bucket in self._buckets(group):
                kernel = self._kernel_for(bucket)
                if kernel is None:
                    self._step(group, bucket)
                else:
                    self._kernel_step(kernel, group, bucket)
        return loss

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _begin(self) -> None:
        """Compute what a step needs from all groups together."""

    def _step(self, group: dict[str, Any], bucket: TensorBucket) -> None:
        held = TensorBucket(bucket.whose, *map(wide, (bucket.parameters, bucket.gradients, bucket.means)))
        updates = self._updates(group, held)
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(held.parameters, updates)
        write(bucket.parameters, held.parameters)
        write(bucket.means, held.means)

    def _updates(self, group: dict[str, Any], bucket: TensorBucket) -> Tensors:
        """The amounts to subtract from the parameters at a learning rate of 1; changes the means, not the gradients."""
        raise NotImplementedError

    def _kernel_step(self, kernel: KernelCall, group: dict[str, Any], bucket: TensorBucket) -> None:
        raise NotImplementedError

    def _buckets(self, group: dict[str, Any]) -> Iterator[TensorBucket]:
        kinds: dict[tuple[torch.device, torch.dtype], Tensors] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for whose in kinds.values():
            parameters, gradients = list(map(local_part, whose)), list(map(local_grad, whose))
            yield TensorBucket(whose, parameters, gradients, self._moments(whose, "exp_avg"))

    def _moments(self, whose: Tensors, name: str) -> Tensors:
        """The local parts of the parameters' moments, which are 0 at first."""
        for parameter in whose:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local_part(self.state[parameter][name]) for parameter in whose]

    def _kernel_for(self, bucket: TensorBucket) -> KernelCall | None:
        """apex's kernel if it can step these parameters; else None, and the reason is logged once."""
        name = f"smp.optimizers.{type(self).__name__}"
        device, dtype = bucket.kind
        kernel = None
        if device != "cuda":
            log_once(f"{name} steps by torch's operations on {device}; apex's kernel is for CUDA")
        elif dtype not in (torch.float32, torch.float16):
            log_once(f"{name} steps {dtype} parameters by torch's operations; apex's kernel has none")
        elif any(self.spread.groups_of(parameter) for parameter in bucket.whose):
            log_once(f"{name} steps by torch's operations where processes share parameters")
        elif (kernel := _apex(self._kernel)) is None:
            log_once(
                f"{name} steps by torch's operations, which is right and slower than apex's kernel. "
                "apex is not installed, or without its CUDA extensions (build NVIDIA's from its repository)",
                logging.WARNING,
            )
        return kernel


def _apex(name: str) -> KernelCall | None:
    """The function that applies a kernel of apex to lists; None if apex or its CUDA extensions are not installed."""
    kernel, apply = optional("amp_C", name), optional("apex.multi_tensor_apply", "multi_tensor_applier")
    if kernel is None or apply is None:
        return None
    return lambda lists, *arguments: apply(
        kernel, torch.zeros(1, dtype=torch.int, device=lists[0][0].device), lists, *arguments
    )


def _check(name: str, group: dict[str, Any]) -> None:
    rules: list[tuple[str, Callable[[Any], bool], str]] = [
        *((setting, lambda value: value >= 0, "at least 0") for setting in ("lr", "eps", "weight_decay")),
        ("betas", lambda pair: len(pair) == 2 and all(0 <= beta < 1 for beta in pair), "two numbers from 0 to below 1"),
        ("norm_type", lambda value: value in (0, 2), "2, or 0 for the largest absolute value"),
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


def wide(tensors: Tensors) -> Tensors:
    """The same tensors, or fp32 copies of 16-bit ones."""
    return [tensor.float() for tensor in tensors] if tensors[0].dtype in _HALVES else tensors


def write(targets: Tensors, results: Tensors) -> None:
    if targets[0] is not results[0]:
        torch._foreach_copy_(targets, results)
