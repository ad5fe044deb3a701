"""Foresees the passes of an engine's model from the batches that it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk_trace import foreseen
from atorch.errors import ArgumentError
from atorch.patrickstar.embeddings import foresee_lookups
from atorch.profiler.tensors import tensors_of
from atorch.runtime.chunk.course import Pass


class Foresight:
    """Foresees passes of `model`, which computes in `dtype` on `device`, on `(args, kwargs)`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._dtype, self._device = model, dtype, device
        self.on_host: set[str] = set()  # names of embeddings that the device does not see

    def __call__(self, batch: Any, /, *, for_real: bool = False, whole: bool = False) -> Pass:
        """A pass on `batch`, on fake tensors, of some blocks for all where they are alike, or by a real run."""

        def loss(duplicate: nn.Module, batch: Any) -> Tensor:
            foresee_lookups(duplicate, self.on_host, self._dtype)
            return _loss(duplicate, batch)

        return foreseen(
            self._model,
            batch,
            loss,
            device_type=self._device.type,
            dtype=self._dtype,
            for_real=for_real,
            whole=whole,
        )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """A loss to foresee a backward pass by: the model's own where it gives one, else one as costly as most are."""
    args, kwargs = batch
    found = [each for each in tensors_of(model(*args, **kwargs)) if each.requires_grad]
    own = [each for each in found if each.numel() == 1]
    if own:
        return own[0]
    if not found:
        raise ArgumentError(f"{type(model).__name__} gives no tensor that gradients could come from")
    return torch.stack([each.float().log_softmax(-1).sum() for each in found]).sum()
