"""Gradient scaling for fp16, where each process has the gradients of a part of the model alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from atorch.distributed.collectives import largest, several, together
from atorch.runtime.optimizer.wrapped_optimizer import dense_gradient
from atorch.runtime.precision.amp import unscale
from atorch.smp.session import is_initialized, session


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, of which all processes of the job skip the same steps, and so have the same scale.

    A stage of a pipeline sees its own gradients alone, and so does a process that has a part of each tensor; torch's
    scaler would skip on one of them and step on the others. Without `smp.init`, or with one process, it is torch's.

    Takes what torch's takes. `device` is CUDA where there is one, else the CPU, on which it scales as well; an
    `init_scale` in its place, where scripts of torch 1 had it, is read as one.

    `unscale_`, or the first `step` of an optimizer without it, is a call that all processes make together. They need
    not all have called `scale`: the loss is on the last stage.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not args or not isinstance(args[0], str):
            args = (kwargs.pop("device", None) or _device_type(), *args)
        super().__init__(*args, **kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and see with all processes whether all are finite.

        Raises:
            ArgumentError: on all processes, where it failed on one.
        """
        self._begin()
        super().unscale_(optimizer)
        self._trusted()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, or skip the step on all processes where one has a gradient that is not finite."""
        self._begin()
        return super().step(optimizer, *args, **kwargs)

    @staticmethod
    def _trusted() -> None:
        if is_initialized() and session().optimizer is not None:
            session().optimizer.trust_gradients()

    def _begin(self) -> None:
        if self._enabled and self._scale is None and _is_shared():
            self._lazy_init_scale_growth_tracker(session().device)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not _is_shared():
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

        def here() -> bool:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            gradients = [each for each in map(dense_gradient, parameters) if each is not None]
            if not allow_fp16 and any(each.dtype == torch.float16 for each in gradients):
                raise ValueError("Attempting to unscale FP16 gradients.")  # in torch's words
            return bool(unscale(gradients, inv_scale, found_inf.device).item())

        (is_found,) = largest([int(together(here))])
        return {found_inf.device: found_inf.fill_(is_found)}


def _is_shared() -> bool:
    return is_initialized() and several()


def _device_type() -> str:
    if is_initialized():
        return session().device.type
    return "cuda" if torch.cuda.is_available() else "cpu"
