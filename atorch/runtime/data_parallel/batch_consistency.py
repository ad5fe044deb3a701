"""Processes that work on one batch together, and are given batches of their own: told in the first passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import largest
from atorch.distributed.fingerprints import both_ways
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.pytree import leaves_of
from atorch.runtime.gradients.no_double_backward import refuse_transforms

LOOKS = 3  # passes that are compared: a loader that deals batches out by rank differs in the first
FEW = 64  # numbers of each tensor
_DIFFERENT = (
    "processes along %s compute one batch together, and were given different ones: take result.dataloader, "
    "which deals batches out along the axes data and zero alone, or deal out yours so"
)


def watch_batches(model: nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Compare what processes that compute one batch together call `model` with in its first training passes.

    Args:
        groups: by the name of the axis along which processes have the same batch.

    Raises:
        ArgumentError: in such a pass, on all of them: shapes or whole numbers, as of tokens, differ. Where
            other numbers do, which may be rounding, it is a warning.
    """
    if groups:
        model.register_forward_pre_hook(refuse_transforms)
        handle: list[Any] = []
        looking = _Looking(groups, handle)
        handle.append(model.register_forward_pre_hook(looking, with_kwargs=True))


class _Looking:
    def __init__(self, groups: Mapping[str, dist.ProcessGroup], handle: Sequence[Any]) -> None:
        self._groups, self._handle, self._left = groups, handle, LOOKS

    def __reduce__(self) -> tuple[Any, ...]:
        return _Looking, ({}, ())  # process groups do not travel, and a copy of the model is not what trains

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (self._groups and model.training and torch.is_grad_enabled()):
            return
        self._left -= 1
        if self._left <= 0:
            self._handle[0].remove()
        exact: list[Any] = []
        rounded: list[Any] = []
        for place, leaf in leaves_of([args, kwargs]):
            if isinstance(leaf, Tensor):
                exact.append((place, tuple(leaf.shape)))
                (rounded if leaf.is_floating_point() else exact).append(leaf.detach().reshape(-1)[:FEW].tolist())
        told = [*both_ways(exact), *both_ways(rounded)]
        for group in self._groups.values():
            told = largest(told, group)  # over the product of the axes in the end, so that all of them raise
        high, low, rounded_high, rounded_low = told
        if high != -low:
            raise ArgumentError(_DIFFERENT % " × ".join(self._groups))
        if rounded_high != -rounded_low:
            logger.warning(_DIFFERENT, " × ".join(self._groups))
