"""Gradient scaling for fp16, where each process has only the gradients of its part of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from atorch.distributed.collectives import all_or_none, all_reduce_max, is_distributed
from atorch.runtime.optimizer.wrapped_optimizer import dense_gradient
from atorch.runtime.precision.amp import unscale
from atorch.smp.session import is_initialized, session


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with which all processes of the job skip the same steps and keep the same scale.

    A pipeline stage or tensor rank sees only its own gradients, so torch's scaler could skip on one process and step on
    the others. Without `smp.init`, or with one process, it behaves as torch's.

    Arguments are torch's. `device` defaults to CUDA if available, else the CPU, where it scales as well. A first
    argument that is not a string is read as `init_scale`, as in scripts of torch 1.

    All processes together call `unscale_`, or without it the first `step` of an optimizer. Not all need to call
    `scale`: the loss is on the last stage.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not args or not isinstance(args[0], str):
            args = (kwargs.pop("device", None) or _device_type(), *args)
        super().__init__(*args, **kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and check on all processes that all are finite.

        Raises:
            ArgumentError: on all processes, if it failed on one.
        """
        self._begin()
        super().unscale_(optimizer)
        if is_initialized() and session().optimizer is not None:
            session().optimizer.mark_synced()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer, or skip the step on all processes if one has a non-finite gradient."""
        self._begin()
        return super().step(optimizer, *args, **kwargs)

    def _begin(self) -> None:
        if self._enabled and self._scale is None and _is_shared():
            self._lazy_init_scale_growth_tracker(session().device)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not _is_shared():
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

        def here() -> bool:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = [gradient for gradient in map(dense_gradient, parameters) if gradient is not None]
            if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
                raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own message
            return bool(unscale(gradients, inv_scale, found_inf.device).item())

        (is_found,) = all_reduce_max([int(all_or_none(here))])
        return {found_inf.device: found_inf.fill_(is_found)}


def _is_shared() -> bool:
    return is_initialized() and is_distributed()


def _device_type() -> str:
    if is_initialized():
        return session().device.type
    return "cuda" if torch.cuda.is_available() else "cpu"
