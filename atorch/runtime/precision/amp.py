"""Mixed precision: autocast around forward and loss, and for fp16 a loss scale that keeps small gradients alive.

fp16 holds nothing below 6e-8, and gradients get there. So backward starts from a large number S instead of 1, all
gradients come out S times larger, and the optimizer divides them by S (Micikevicius et al., "Mixed Precision
Training", arXiv 1710.03740). The scaling is the identity forward and multiplies backward: the loss that users print is
the true one. Where a gradient overflows, the step is skipped and S halved; after 2,000 good steps in a row S doubles.

Gradients stay scaled until the optimizer steps; what looks at them before divides by `LossScale()`. All processes of
the job skip together: they agree on one flag a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from atorch.distributed.collectives import everyone
from atorch.logs import logger
from atorch.model.method_override import override
from atorch.model.user_functions import LossFunc
from atorch.runtime.loss.loss_value import value_of, with_value
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, local_state_dict

_LARGEST = 2.0**127  # the largest power of two in fp32, which gradients of the loss are computed in


def autocast_forward(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run `model.forward` under autocast from now on. Its state, signature and class name stay."""
    # A forward that somebody put on the instance hides that of the class; then the call itself is overridden.
    name = "__call__" if "forward" in vars(model) else "forward"
    override(model, name, _autocasting, device_type, dtype)


def _autocasting(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    def autocast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(self, *args, **kwargs)

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
    """Inside, autocast casts a weight whenever it is used, and keeps no cast for who uses it next."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class LossScale:
    """The factor of gradients: `scale()`. Dynamic, or constant where growth and backoff are 1.

    init: the first scale. growth: factor after `interval` good steps in a row. backoff: factor after a skipped step.
    hysteresis: skipped steps after which it backs off; they are counted anew once it has grown.
    smallest: it never falls below.
    consecutive: a good step lets skipped ones be counted anew, too.
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
        """The scale, how many good steps it has had, and how many skipped ones make it back off."""
        return {"scale": self.value, "good_steps": self.good_steps, "patience": self.patience}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.patience = int(state.get("patience", self.hysteresis))


def scale_loss(loss_func: LossFunc, scale: LossScale) -> LossFunc:
    """`loss_func` whose loss is the same number, and whose gradients are `scale()` times as large."""

    @functools.wraps(loss_func)
    def scaled(batch: Any, output: Any) -> Any:
        loss = loss_func(batch, output)
        value = value_of(loss)
        if not value.requires_grad:
            return loss
        alias = value.view_as(value)  # a hook on the user's own tensor would stay with it
        alias.register_hook(lambda gradient: gradient * scale())  # the scale of the time when backward runs
        return with_value(loss, alias)

    return scaled


@torch.no_grad()
def unscale(gradients: Iterable[torch.Tensor], factor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Multiply dense gradients by `factor`, in place; a number on `device`, 0 if all of them were finite."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    overflow = torch.zeros((), device=device)
    for (where, _), same in kinds.items():
        found = overflow if where == device else torch.zeros((), device=where)
        # One fused pass that checks and multiplies; the one torch.amp.GradScaler is made of.
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, factor.to(where))
        if found is not overflow:
            overflow += found.to(device)
    return overflow


class ScaledOptimizer(WrappedOptimizer):
    """Steps where all gradients of all processes are finite, and skips the step everywhere where one is not.

    scale: what the gradients are multiplied by; updated after each step. `LossScale(1.0, growth=1.0, backoff=1.0)`
        gives an optimizer that only skips.
    unscale: divide the gradients by the scale before stepping; False where the inner optimizer does it in fp32.
    device: where the processes exchange the flag; None for the gradients' own device.
    """

    step_was_skipped = False  # whether the last step() was

    def __init__(
        self, inner: Optimizer, scale: LossScale, *, unscale: bool = True, device: torch.device | None = None
    ) -> None:
        super().__init__(inner)
        self.scale, self._unscale, self._device = scale, unscale, device

    def step(self, closure: Any = None) -> Any:
        """Un-scale the gradients and step, or skip; `step_was_skipped` says which.

        Raises:
            ArgumentError: a closure was given.
        """
        self._refuse(closure)
        self.step_was_skipped = self._unscaled_overflow(self._unscale)
        result = None if self.step_was_skipped else self.inner.step()
        self.scale.update(self.step_was_skipped)
        return result

    def overflows(self) -> bool:
        """True if a gradient of any process is infinite or no number, which skips the next step; all processes ask."""
        return self._unscaled_overflow(unscales=False)

    @torch.no_grad()
    def _unscaled_overflow(self, unscales: bool) -> bool:
        """Un-scale all gradients in place, if so; whether one of any process is infinite or no number."""
        gradients = list(self.gradients())
        device = self._device or next((each.device for each in gradients), torch.device("cpu"))
        factor = torch.full((), 1.0 / self.scale() if unscales else 1.0, device=device)
        overflow = unscale(gradients, factor, device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(overflow, dist.ReduceOp.MAX, group=everyone())
        return bool(overflow.item())

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with the scale under `loss_scale`."""
        return {**super().state_dict(), "loss_scale": self.scale.state_dict()}

    def local_state_dict(self) -> dict[str, Any]:
        """This process's part of the inner optimizer's state."""
        return local_state_dict(self.inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; one without a scale, of another precision, keeps this one's."""
        state_dict = dict(state_dict)
        if (saved := state_dict.pop("loss_scale", None)) is not None:
            self.scale.load_state_dict(saved)
        super().load_state_dict(state_dict)
