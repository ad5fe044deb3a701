"""Mixed precision: autocast around forward and loss, and for fp16 a loss scale against underflow of small gradients.

fp16 has no numbers below 6e-8, and gradients can be smaller. So backward starts from a large number S instead of 1,
which makes all gradients S times larger. The optimizer divides them by S (Micikevicius et al., "Mixed Precision
Training", arXiv 1710.03740). The scaling is the identity in forward and multiplies in backward, so users see the true
loss. If a gradient overflows, the step is skipped and S is halved. After 2,000 consecutive good steps S doubles.

Gradients stay scaled until the optimizer steps; code that reads them earlier divides by `LossScale()`. All processes of
the job skip steps together, as they reduce one flag per step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from atorch.distributed.collectives import world_group
from atorch.logs import log_once, logger
from atorch.model.pytree import in_fp32
from atorch.model.user_functions import LossFunc, value_of, with_value
from atorch.model.wrapper import override_forward
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, caller_in_torch, local_state_dict

_LARGEST = 2.0**127  # the largest power of two in fp32, the dtype of the loss's gradient


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run `model.forward` under autocast from now on, and return fp32. Its state, signature and class name stay.

    Code outside forward and loss has no autocast: metrics, NumPy, and other models get the dtype of plain training.
    """
    override_forward(model, _autocasting, device_type, dtype)


def _autocasting(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    def autocast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            output = forward(self, *args, **kwargs)
        return in_fp32(output)

    return autocast


def autocast_loss(loss_func: LossFunc, device_type: str, dtype: torch.dtype) -> LossFunc:
    """`loss_func` under autocast, which computes cross entropies and the like in fp32."""

    @functools.wraps(loss_func)
    def autocast(batch: Any, output: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return loss_func(batch, output)

    return autocast


@contextmanager
def casting_anew() -> Iterator[None]:
    """Inside, autocast casts a weight at each use, without its cache."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class LossScale:
    """The factor of gradients, `scale()`: dynamic, or constant if growth and backoff are 1.

    init: the first scale. growth: factor after `interval` consecutive good steps. backoff: factor after a skipped step.
    hysteresis: number of skipped steps before it backs off; the count restarts after a growth.
    smallest: lower bound of the scale.
    consecutive: restart that count after every good step, too.
    """

    def __init__(
        self,
        init: float = 2.0**16,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        hysteresis: int = 1,
        smallest: float = 0.0,
        consecutive: bool = False,
    ) -> None:
        self.value = init
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.hysteresis, self.smallest, self.consecutive = hysteresis, smallest, consecutive
        self.good_steps, self.patience = 0, hysteresis

    def __call__(self) -> float:
        return self.value

    def update(self, skipped: bool) -> None:
        if skipped:
            self.good_steps = 0
            if self.patience > 1:
                self.patience -= 1
            else:
                self._back_off()
            return
        self.good_steps += 1
        if self.consecutive:
            self.patience = self.hysteresis
        if self.good_steps == self.interval:
            self.value, self.good_steps = min(self.value * self.growth, _LARGEST), 0
            self.patience = self.hysteresis

    def _back_off(self) -> None:
        before = self.value
        self.value = max(self.value * self.backoff, min(self.smallest, before))
        if self.value < before and (self.value < 1 <= before or self.value == self.smallest):
            logger.warning(
                "the loss scale has fallen to %g: gradients are not finite at any scale. Look for NaN in the "
                "loss or the data, or train in bf16",
                self.value,
            )

    def state_dict(self) -> dict[str, float]:
        """The scale, its number of good steps, and the number of skipped steps left before it backs off."""
        return {"scale": self.value, "good_steps": self.good_steps, "patience": self.patience}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.patience = int(state.get("patience", self.hysteresis))


def scale_loss(loss_func: LossFunc, scale: LossScale) -> LossFunc:
    """`loss_func` with the same loss, whose gradients are `scale()` times as large."""

    @functools.wraps(loss_func)
    def scaled(batch: Any, output: Any) -> Any:
        loss = loss_func(batch, output)
        value = value_of(loss)
        if not value.requires_grad:
            return loss
        alias = value.view_as(value)  # a hook on the user's own tensor would stay on it
        alias.register_hook(scale_gradient)
        return with_value(loss, alias)

    def scale_gradient(gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # with create_graph=True
            log_once(
                "create_graph=True was given for a loss whose gradients fp16 scales: compute the penalty inside "
                "loss_func, or divide its gradients by result.optim.scale() and multiply it by that",
                logging.WARNING,
            )
        return gradient * scale()  # the scale at the time of backward

    return scaled


@torch.no_grad()
def unscale(gradients: Iterable[torch.Tensor], factor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Multiply dense gradients by `factor`, in place; returns a number on `device`, 0 if all were finite."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    overflow = torch.zeros((), device=device)
    for (place, _), same in kinds.items():
        nonfinite = overflow if place == device else torch.zeros((), device=place)
        # One fused pass that checks and multiplies, as in torch.amp.GradScaler.
        torch._amp_foreach_non_finite_check_and_unscale_(same, nonfinite, factor.to(place))
        if nonfinite is not overflow:
            overflow += nonfinite.to(device)
    return overflow


class ScaledOptimizer(WrappedOptimizer):
    """Steps if all gradients of all processes are finite, and skips the step on all processes otherwise.

    scale: the factor of the gradients, updated after each step. `LossScale(1.0, growth=1.0, backoff=1.0)` gives an
        optimizer that only skips.
    unscale: divide the gradients by the scale before stepping; False if the inner optimizer does it in fp32.
    device: the device of the flag that processes reduce; None for the gradients' own device.
    """

    step_was_skipped = False  # of the last step()

    def __init__(
        self, inner: Optimizer, scale: LossScale, *, unscale: bool = True, device: torch.device | None = None
    ) -> None:
        super().__init__(inner)
        self.scale, self._unscale, self._device = scale, unscale, device

    def step(self, closure: Any = None) -> Any:
        """Un-scale the gradients and step, or skip; `step_was_skipped` has the outcome.

        Raises:
            ArgumentError: a closure was given.
        """
        self._refuse(closure)
        self.step_was_skipped = self._unscaled_overflow(self._unscale)
        result = None if self.step_was_skipped else self.inner.step()
        self.scale.update(self.step_was_skipped)
        return result

    def overflows(self) -> bool:
        """True if a gradient of any process is not finite, so the next step skips. All processes must call it."""
        return self._unscaled_overflow(unscales=False)

    @torch.no_grad()
    def _unscaled_overflow(self, unscales: bool) -> bool:
        """Un-scale all gradients in place, if `unscales`. True if one of any process is not finite."""
        gradients = list(self.gradients())
        device = self._device or next((gradient.device for gradient in gradients), torch.device("cpu"))
        factor = torch.full((), 1.0 / self.scale() if unscales else 1.0, device=device)
        overflow = unscale(gradients, factor, device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=world_group())
        return bool(overflow.item())

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with `loss_scale`, also in the first group: torch copies groups only."""
        saved, scale = super().state_dict(), {"loss_scale": self.scale.state_dict()}
        first, *others = saved["param_groups"]
        return {**saved, **scale, "param_groups": [{**first, **scale}, *others]}

    def local_state_dict(self) -> dict[str, Any]:
        """This process's part of the inner optimizer's state."""
        return local_state_dict(self.inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; one of another precision, without a scale, keeps the current scale."""
        first, *others = map(dict, state_dict["param_groups"])
        flat = caller_in_torch().get("state_dict", {})  # of flatten_optimizer_state_dict
        scales = [first.pop("loss_scale", None), *(value for key, value in flat.items() if key.endswith(".loss_scale"))]
        scale_state = next((scale for scale in scales if scale is not None), None)
        state_dict = {"loss_scale": scale_state, **state_dict, "param_groups": [first, *others]}
        if (saved := state_dict.pop("loss_scale")) is not None:
            self.scale.load_state_dict(saved)
        super().load_state_dict(state_dict)
