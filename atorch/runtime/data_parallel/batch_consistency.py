"""Checks in the first passes that ranks which compute one batch together are given the same batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import all_reduce_max
from atorch.distributed.fingerprints import both_ways
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.pytree import leaves_of
from atorch.runtime.gradients.no_double_backward import refuse_transforms

LOOKS = 3  # compared passes: a loader that distributes batches by rank differs in the first
FEW = 64  # compared elements of each tensor
_DIFFERENT = (
    "processes along %s compute one batch together, and were given different ones: take result.dataloader, "
    "which deals batches out along the axes data and zero alone, or deal out yours so"
)


def watch_batches(model: nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Compare the inputs of `model` between ranks that compute one batch together, in its first training passes.

    Args:
        groups: process groups by the name of the axis along which ranks have the same batch.

    Raises:
        ArgumentError: in such a pass, on all ranks: shapes or integers, such as tokens, differ. Different
            floats, which may be rounding, are a warning.
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
        return _Looking, ({}, ())  # process groups cannot be pickled, and a copy of the model need not be watched

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
        hashes = [*both_ways(exact), *both_ways(rounded)]
        for group in self._groups.values():
            hashes = all_reduce_max(hashes, group)  # in the end over the product of the axes, so that all ranks raise
        high, low, rounded_high, rounded_low = hashes
        if high != -low:
            raise ArgumentError(_DIFFERENT % " × ".join(self._groups))
        if rounded_high != -rounded_low:
            logger.warning(_DIFFERENT, " × ".join(self._groups))
