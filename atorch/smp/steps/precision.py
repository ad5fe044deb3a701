"""Training in 16 bits: the dtype of computation, and the loss scale that fp16's small gradients need.

Parameters, activations and gradients are in fp16 or bf16, and the optimizer steps fp32 masters
(`runtime.precision.master_weights`). The model takes floating-point inputs of any width and returns fp32, so that
losses are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import ArgumentError, check_bools, near_miss, shown
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


@dataclass(frozen=True)
class DynamicScale:
    """The settings of a dynamic loss scale, by their documented names."""

    init_scale: float = 2.0**32
    """The initial scale."""
    scale_factor: float = 2.0
    """The factor by which it grows or shrinks."""
    scale_window: int = 1000
    """Consecutive good steps after which it grows."""
    min_scale: float = 1.0
    """Its lower bound."""
    delayed_shift: int = 1
    """Skipped steps after which it shrinks."""
    consecutive_hysteresis: bool = False
    """True if a good step resets the count of skipped steps; else growth of the scale resets it."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> DynamicScale:
        """The settings from keyword arguments.

        Raises:
            ArgumentError: a setting is unknown or invalid.
        """
        names = [field.name for field in fields(cls)]
        for name, value in settings.items():
            if name not in names:
                raise ArgumentError(
                    f"smp.DistributedOptimizer was given {name}, and a dynamic loss scale has no such setting; "
                    f"{near_miss(name, names)}"
                )
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            holds, what = is_number and value > 0, "a number above 0"
            if name == "consecutive_hysteresis":
                holds, what = isinstance(value, bool), "True or False"
            elif name in ("scale_window", "delayed_shift"):
                holds, what = is_number and value >= 1 and value == int(value), "a number of steps, 1 or more"
            elif name == "scale_factor":
                holds, what = is_number and value > 1, "a number above 1"
            if not holds:
                raise ArgumentError(f"smp.DistributedOptimizer was given {shown(value)} as {name}; it is {what}")
        return cls(**settings)

    def scale(self) -> LossScale:
        return LossScale(
            float(self.init_scale), growth=float(self.scale_factor), backoff=1.0 / self.scale_factor,
            interval=int(self.scale_window), hysteresis=int(self.delayed_shift), smallest=float(self.min_scale),
            consecutive=self.consecutive_hysteresis,
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
    dynamic = DynamicScale.of({**(nested or {}), **named})
    if is_dynamic:
        return dynamic.scale()
    constant = 1.0 if static is None else static
    if isinstance(constant, bool) or not isinstance(constant, (int, float)) or not constant > 0:
        raise ArgumentError(
            f"smp.DistributedOptimizer was given {shown(static)} as static_loss_scale; give a number above 0"
        )
    return LossScale(float(constant), growth=1.0, backoff=1.0)
