"""Norms over all parts of a partitioned model, and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from atorch.distributed.collectives import call_on_all_ranks
from atorch.errors import ArgumentError, shown
from atorch.logs import OF_THIS_RANK, logger
from atorch.runtime.gradients.clip import Spread, clip_grads, parts_of
from atorch.smp.model import DistributedModel
from atorch.smp.session import session


def spread_of(model: DistributedModel) -> Spread:
    """The distribution of a partitioned model over processes: pipeline stages, and parts on tensor ranks."""
    placed: Any = model.placed()
    parts, ties = parts_of(placed, placed._atorch), model.runner and model.runner.ties
    if not ties:
        return Spread(parts=parts)
    return Spread((session().mesh.group("pipeline"),), parts, ties.counted_elsewhere)


def clip(
    model: DistributedModel, parameters: Iterable[Tensor], call: str, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip the gradients of this process's `parameters`, as `DistributedModel.clip_grad_norm_` does.

    call: name of the script's call, for errors.

    Raises:
        ArgumentError: the model is not partitioned yet, or `max_norm` or `norm_type` is not above 0.
    """
    runner = model.runner
    if runner is None:
        raise ArgumentError(f"{call} was called before the first smp.step, which makes gradients; call it after")
    norm_type = math.inf if norm_type == "inf" else norm_type  # type: ignore[comparison-overlap]
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
            raise ArgumentError(f"{call} was given {shown(value)} as {name}; give a number above 0")
    if not model.joins:  # inside `join` some replicas may have no batches left
        call_on_all_ranks(call, dict, lambda: None, is_frequent=True)  # detects processes that skip this call
    spread, scale = spread_of(model), runner.loss_scale
    return clip_grads(parameters, max_norm * scale, norm_type, spread) / scale


class ScaledApart:
    """Detects that a script has scaled gradients itself, as torch's `clip_grad_norm_` does.

    That function takes the norm of this process's part of the model only, so that parts are scaled by different
    factors. A warning is logged once; torch is not patched to prevent it.
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, int, Tensor] | None = None
        self._was_told = False

    @torch.no_grad()
    def look(self, model: DistributedModel) -> None:
        """Record the current, correct gradients, by a copy of the smallest one. No communication."""
        self._seen = None
        spread = spread_of(model)
        if self._was_told or not (spread.over or spread.parts):
            return
        gradients = [leaf.grad for leaf in model.parameters() if leaf.grad is not None and not leaf.grad.is_sparse]
        if gradients:
            smallest = min(gradients, key=Tensor.numel)
            self._seen = smallest, smallest._version, smallest.clone()

    def tell(self) -> None:
        """Warn if the recorded gradient has changed since `look`."""
        if self._seen is None:
            return
        gradient, version, before = self._seen
        self._seen = None
        if gradient._version == version or bool((gradient == before).all()):
            return
        self._was_told = True
        logger.warning(
            "gradients were changed between the step and optimizer.step(). Where that was "
            "torch.nn.utils.clip_grad_norm_, it took the norm of this process's part of the model alone: call "
            "optimizer.clip_master_grads(max_norm), in any precision, which takes the norm of the whole model",
            extra=OF_THIS_RANK,
        )
