"""Training in 16 bits: what the model computes in, and the scale that fp16's small gradients need.

Parameters, activations and gradients are in fp16 or bf16, and the optimizer steps fp32 masters
(`runtime.master_weights`). The model takes floating-point inputs of any width, and its output comes out in fp32, so
that losses are computed in that.
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
    """The 16-bit type that a configuration trains in; None for the parameters' own."""
    return torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None


def halve(parts: Iterable[nn.Module], dtype: torch.dtype) -> WeakTensorKeyDictionary:
    """Let the parts of a model compute in `dtype`, in place; returns the values that parameters had, by parameter."""
    held = nn.ModuleList(parts)
    values = to_half([held], dtype)  # at once: several parts may hold one parameter
    for part in held:
        cast_arguments(part, dtype)
    return values


def widen_output(part: nn.Module) -> None:
    """Let the model's output come out in fp32 where `part` makes it."""
    stage = stage_in(part)
    if stage is None or stage.is_last:
        part.register_forward_hook(lambda module, args, output: map_tensors(_widened, output))


def _widened(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf


@dataclass(frozen=True)
class DynamicScale:
    """The documented settings of a dynamic loss scale."""

    init_scale: float = 2.0**32
    """The first scale."""
    scale_factor: float = 2.0
    """The factor that it grows or falls by."""
    scale_window: int = 1000
    """Good steps in a row after which it grows."""
    min_scale: float = 1.0
    """It never falls below."""
    delayed_shift: int = 1
    """Skipped steps after which it falls."""
    consecutive_hysteresis: bool = False
    """True if a good step lets these be counted anew; else the scale's growth does."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DynamicScale:
        """The settings from arguments by name.

        Raises:
            ArgumentError: there is no such setting, or one holds what it cannot.
        """
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ArgumentError(
                    f"smp.DistributedOptimizer was given {name}, and a dynamic loss scale has no such setting; "
                    f"{near_miss(name, known)}"
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
        return cls(**given)

    def scale(self) -> LossScale:
        return LossScale(
            float(self.init_scale),
            growth=float(self.scale_factor),
            backoff=1.0 / self.scale_factor,
            interval=int(self.scale_window),
            hysteresis=int(self.delayed_shift),
            smallest=float(self.min_scale),
            consecutive=self.consecutive_hysteresis,
        )


def loss_scale_of(
    static: float | None, is_dynamic: bool, nested: Mapping[str, Any] | None, named: Mapping[str, Any]
) -> LossScale:
    """The loss scale that the arguments of an optimizer say.

    Args:
        static: the constant one; None is 1.
        nested, named: settings of the dynamic one, as a dict and one by one.

    Raises:
        ArgumentError: they do not hold, or contradict each other.
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
