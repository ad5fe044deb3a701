"""Training in 16 bits: the dtype of computation, and the loss scale that fp16's small gradients need.

Parameters, activations and gradients are in fp16 or bf16, and the optimizer steps fp32 masters
(`runtime.precision.master_weights`). The model takes floating-point inputs of any width and returns fp32, so that
losses are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import ArgumentError, check_bools, shown
from atorch.files.config_dict import Section
from atorch.model.pytree import map_tensors
from atorch.runtime.precision.amp import LossScale
from atorch.runtime.precision.master_weights import cast_arguments, to_half
from atorch.smp.config import Config
from atorch.smp.steps.micro_batch_run import stage_in


def half_of(config: Config) -> torch.dtype | None:
    """The 16-bit dtype of training; None to keep the parameters' own."""
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None


def halve(parts: Iterable[nn.Module], dtype: torch.dtype) -> WeakTensorKeyDictionary:
    """Convert the parts of a model to `dtype` in place; returns the previous values, by parameter."""
    modules = nn.ModuleList(parts)
    values = to_half([modules], dtype)  # in one call: several parts may share a parameter
    for part in modules:
        cast_arguments(part, dtype)
    return values


def widen_output(part: nn.Module) -> None:
    """Convert the model's output to fp32 if `part` computes it."""
    stage = stage_in(part)
    if stage is None or stage.is_last:
        part.register_forward_hook(lambda module, args, output: map_tensors(_widened, output))


def _widened(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf


class DynamicScale(Section):
    """The settings of a dynamic loss scale, by their documented names."""

    init_scale: float = Field(2.0**32, gt=0, description="the initial scale")
    scale_factor: float = Field(2.0, gt=1, description="the factor by which it grows or shrinks")
    scale_window: int = Field(1000, ge=1, description="consecutive good steps after which it grows")
    min_scale: float = Field(1.0, gt=0, description="its lower bound")
    delayed_shift: int = Field(1, ge=1, description="skipped steps after which it shrinks")
    consecutive_hysteresis: bool = Field(
        False,
        strict=True,
        description="True if a good step resets the count of skipped steps; else growth of the scale resets it",
    )

    def scale(self) -> LossScale:
        return LossScale(
            self.init_scale, growth=self.scale_factor, backoff=1.0 / self.scale_factor, interval=self.scale_window,
            hysteresis=self.delayed_shift, smallest=self.min_scale, consecutive=self.consecutive_hysteresis,
        )  # fmt: skip


def loss_scale_of(
    static: float | None, is_dynamic: bool, nested: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> LossScale:
    """The loss scale that the arguments of an optimizer describe.

    Args:
        static: the constant scale; None for 1.
        nested, named: settings of the dynamic scale, as a dict and as keyword arguments.

    Raises:
        ArgumentError: an argument is invalid, or two contradict each other.
    """
    check_bools("smp.DistributedOptimizer", dynamic_loss_scale=is_dynamic)
    if nested is not None and not isinstance(nested, Mapping):
        raise ArgumentError(
            f"smp.DistributedOptimizer was given {shown(nested)} as dynamic_loss_args; give a dict of settings"
        )
    dynamic = DynamicScale.checked({**(nested or {}), **named}, "smp.DistributedOptimizer")
    if is_dynamic:
        return dynamic.scale()
    constant = 1.0 if static is None else static
    if isinstance(constant, bool) or not isinstance(constant, (int, float)) or not constant > 0:
        raise ArgumentError(
            f"smp.DistributedOptimizer was given {shown(static)} as static_loss_scale; give a number above 0"
        )
    return LossScale(float(constant), growth=1.0, backoff=1.0)
