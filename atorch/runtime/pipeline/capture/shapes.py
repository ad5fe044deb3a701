"""Shapes of the results of calls, which a later stage must know before it receives them.

The first micro-batch of every size runs once stage by stage, without gradients, to observe shapes and dtypes under
the strategy applied to the stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.model.pytree import leaves_of

ArgumentShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The place and shape of every tensor in a call's arguments."""


class TensorSpec(NamedTuple):
    """Sizes and dtype of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor of this shape that takes no memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.sizes)


def shape_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def sizes_of(data: Any) -> ArgumentShapes:
    """The sizes of the tensors in `data`, by place."""
    return tuple((place, tuple(leaf.shape)) for place, leaf in leaves_of(data) if isinstance(leaf, Tensor))
