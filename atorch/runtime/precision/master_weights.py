"""Half precision: the model's floating-point values in 16 bits, and fp32 master weights in the optimizer.

An update smaller than half the distance to a weight's 16-bit neighbour (2⁻⁹ of it in bf16) would be rounded away. The
fp32 master accumulates such updates. A step casts gradients to fp32 and un-scales them, runs the inner optimizer on the
masters, and rounds the masters into the model.

Bytes per parameter: 2 weight + 2 gradient + 4 master + the optimizer's fp32 states (Adam 8). The fp32 gradient takes
4 more during a step. Plain fp32 has 4 + 4 + 8, the same 16 for Adam; the savings are in activations, gradients and
communication.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import CheckpointError
from atorch.model.pytree import map_tensors
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.optimizer.shadow_parameters import ShadowOptimizer, fp32_value_of
from atorch.runtime.optimizer.wrapped_optimizer import (
    HAS_MASTERS,
    MASTER,
    caller_in_torch,
    dense_gradient,
    innermost,
    layers_of,
    local,
)


def to_half(models: Iterable[nn.Module], dtype: torch.dtype) -> WeakTensorKeyDictionary:
    """Cast the models' floating-point parameters and buffers to `dtype` (fp16 or bf16), in place.

    Returns the former values of their trainable parameters, by parameter, from which `with_master_weights` starts. They
    are freed with their parameters, for example when sharding replaces these.
    """
    values = WeakTensorKeyDictionary()
    for model in models:
        trainable = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
        # A detached value would share the parameter's version counter.
        before = [(parameter, parameter.data) for parameter in trainable if not parameter.is_meta]
        if dtype == torch.float16:
            model.half()
        else:
            model.bfloat16()
        for parameter, value in before:  # only now, as a fake parameter with a weak reference cannot be cast
            values[parameter] = value
    return values


def cast_inputs(prepare_input: Callable[[Any, Any], Any], dtype: torch.dtype) -> Callable[[Any, Any], Any]:
    """`prepare_input` with a cast of all floating-point tensors in its result, nested ones included, to `dtype`."""

    return lambda data, device: map_tensors(lambda leaf: _cast(dtype, leaf), prepare_input(data, device))


def cast_arguments(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `model` cast its floating-point arguments to `dtype`, for inputs that do not pass `cast_inputs`."""
    if not isinstance(model, torch.jit.ScriptModule):  # takes no hooks
        model.register_forward_pre_hook(functools.partial(_cast_call, dtype), with_kwargs=True)


def _cast_call(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    cast = [_cast(dtype, leaf) for leaf in leaves]
    if all(map(operator.is_, cast, leaves)):
        return None  # keep the caller's containers
    return tree_unflatten(cast, spec)


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def with_master_weights(
    make_optimizer: MakeOptimizer,
    loss_scale: Callable[[], float] = lambda: 1.0,
    values: WeakTensorKeyDictionary | None = None,
) -> MakeOptimizer:
    """`make_optimizer` whose optimizers step on fp32 masters of their 16-bit parameters.

    loss_scale: the divisor of gradients, applied in fp32. values: the parameters' values before rounding.
    """
    before = WeakTensorKeyDictionary() if values is None else values
    return lambda groups: MasterWeights(make_optimizer, groups, loss_scale, before)


class MasterWeights(ShadowOptimizer):
    """An optimizer of 16-bit parameters around an optimizer of their fp32 masters.

    Frozen parameters, and fp32 ones, have no master. A weight written elsewhere (`load_state_dict`, an average) becomes
    its master's new value.
    """

    name_of_shadow = MASTER

    def __init__(
        self,
        make_inner: MakeOptimizer,
        groups: Iterable[Any],
        loss_scale: Callable[[], float],
        values: WeakTensorKeyDictionary,
    ) -> None:
        self._loss_scale, self._values = loss_scale, values
        super().__init__(make_inner, groups)
        self._values = WeakTensorKeyDictionary()  # free values of parameters that other processes step

    def step(self, closure: Any = None) -> Any:
        """Step on the masters and round them into the parameters.

        Raises:
            ArgumentError: a closure was given.
        """
        self._refuse(closure)
        self._follow_changes()
        self._give_late_masters()
        pairs: list[tuple[Any, Any]] = [(p, self.shadows.get(p, p)) for shown in self._shown for p in shown]
        trained = [(parameter, master) for parameter, master in pairs if parameter.grad is not None]
        halves = [(parameter, master) for parameter, master in trained if master is not parameter]
        for parameter, master in halves:
            master.grad = parameter.grad.float()
        factor = 1.0 / self._loss_scale()
        if factor != 1.0 and trained:
            torch._foreach_mul_([grad for _, master in trained if (grad := dense_gradient(master)) is not None], factor)
        with self._with_shadows():
            result = self.inner.step()
        for _, master in halves:
            master.grad = None
        self._round(halves)
        return result

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return {**saved, "param_groups": [{**group, HAS_MASTERS: True} for group in saved["param_groups"]]}

    @torch.no_grad()
    def _load(self, saved: dict[str, Any]) -> None:
        """Load a state, and the parameters' values from its masters; without any, masters and parameters stay."""
        super()._load(without_masters(saved))
        masters = [(parameter, entry[MASTER]) for parameter, entry in self._entries(saved) if _has_master(entry)]
        for parameter, value in masters:
            if parameter in self.shadows:
                self.shadows[parameter].copy_(value)
        if masters:
            self._round(list(self.shadows.items()))

    def _joined(self, parameter: torch.Tensor, made: Sequence[Any]) -> Any:
        """The inner optimizer's state, with the master under `master`."""
        master = self.shadows.get(parameter)
        return made[0] if master is None else {**(made[0] or {}), MASTER: master.detach()}

    def _make_shadow(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if not (parameter.requires_grad and _is_half(parameter)):
            return None
        value = fp32_value_of(self._values, parameter)
        if value is not None:
            value = value.to(parameter.device, torch.float32)
        if value is None or not torch.equal(value.to(parameter.dtype), parameter.detach()):
            value = parameter.detach().to(torch.float32)  # the weight changed since, or was never wider
        return nn.Parameter(value)

    def _give_late_masters(self) -> None:
        """Make masters for parameters that were frozen when the optimizer was made and now have a gradient."""
        for parameter in itertools.chain.from_iterable(self._shown):
            if _is_half(parameter) and parameter.grad is not None:
                self._shadow_of(parameter)

    @torch.no_grad()
    def _follow_changes(self) -> None:
        """Update masters of weights that were written since the last step.

        A master whose rounded value equals the weight stays, since broadcasting weights after a step writes them, too.
        """
        for parameter, master in self._changed():
            wide, weight = local(master), local(parameter)
            wide.copy_(torch.where(wide.to(weight.dtype) == weight, wide, weight.to(wide.dtype)))

    @torch.no_grad()
    def _round(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if pairs:
            torch._foreach_copy_([local(parameter) for parameter, _ in pairs], [local(master) for _, master in pairs])
        self._note_values()


def let_take_masters(optimizer: Optimizer | None) -> None:
    """Let an optimizer without masters take those of a loaded state as its parameters' values."""
    if hasattr(innermost(optimizer), "register_load_state_dict_pre_hook") and not _steps_masters(optimizer):
        innermost(optimizer).register_load_state_dict_pre_hook(take_masters)


@torch.no_grad()
def take_masters(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Copy the masters of a state that is to be loaded into the parameters; returns what is left to load.

    Raises:
        CheckpointError: the state is one of `MasterWeights`, and its masters are missing, which the optimizer needs.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    masters = [
        (parameter, saved["state"][number][MASTER])
        for number, parameter in zip(numbers, params, strict=False)
        if _has_master(saved["state"].get(number))
    ]
    flat = caller_in_torch().get("state_dict", {})  # of flatten_optimizer_state_dict
    has_masters = any(group.get(HAS_MASTERS) for group in saved["param_groups"])
    has_masters = has_masters or any(key.endswith(f".{MASTER}") for key in flat)
    is_half = _steps_masters(optimizer)
    if has_masters and not masters and not is_half and any(parameter.requires_grad for parameter in params):
        raise CheckpointError(
            "the optimizer's state is of a job under half, and its fp32 masters are left out: by dcp.load, or because "
            "it is flattened. Use atorch.load_checkpoint, or load what optim.state_dict() returned"
        )
    for parameter, master in masters:
        parameter.copy_(master)
    return saved if is_half else without_masters(saved)


def _steps_masters(optimizer: Optimizer | None) -> bool:
    return any(isinstance(layer, MasterWeights) for layer in layers_of(optimizer))


def without_masters(saved: dict[str, Any]) -> dict[str, Any]:
    """A state of `MasterWeights` as one of the inner optimizer."""
    state = {}
    for number, entry in saved["state"].items():
        rest = {key: value for key, value in entry.items() if key != MASTER} if _has_master(entry) else entry
        if rest or not _has_master(entry):  # an optimizer without states, such as SGD, had an entry for its master only
            state[number] = rest
    groups = [{key: value for key, value in group.items() if key != HAS_MASTERS} for group in saved["param_groups"]]
    return {**saved, "state": state, "param_groups": groups}


def _has_master(entry: Any) -> bool:
    return isinstance(entry, dict) and MASTER in entry


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
