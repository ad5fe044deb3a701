"""Norms of a model's parameters and gradients, of which this process may have only parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.gradients.clip import Key, norm_of_grads, spread_over


@dataclass(frozen=True)
class Spread:
    """The distribution of a model over processes; without arguments, none.

    DTensors are not listed here, since their placements suffice.

    over: groups whose ranks have different parameters, such as the stages of a pipeline.
    parts: for plain tensors that are parts of one parameter, the groups whose ranks have the other parts.
    counted_elsewhere: parameters that another rank of `over` has, too, and counts.
    """

    over: Sequence[dist.ProcessGroup] = ()
    parts: Mapping[Tensor, Key] = field(default_factory=dict)
    counted_elsewhere: Collection[Tensor] = ()

    def norm_of_grads(self, parameters: Iterable[Tensor]) -> Tensor:
        """The L2 norm of all gradients of the model, in fp32; `parameters` are this process's. A collective call."""
        return norm_of_grads(parameters, 2.0, self.over, self.parts, self.counted_elsewhere)

    def norms(self, values: Sequence[Tensor], parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of each full value, of shape `(len(values),)`; `values` are local parts, sharded like `parameters`.

        `values` are plain tensors on one device. All ranks with parts of the same parameters must call it together.
        """
        # The infinity norm of no elements is undefined.
        held = [value if value.numel() else value.new_zeros(1) for value in values]
        wide = torch.float64 if values[0].dtype == torch.float64 else torch.float32  # 16 bits would overflow
        norms = torch.stack(torch._foreach_norm(held, norm_type, dtype=wide))
        places: dict[Key, list[int]] = {}
        for place, parameter in enumerate(parameters):
            places.setdefault(spread_over(parameter, self.parts), []).append(place)
        for groups, mine in places.items():
            if groups:
                norms[mine] = _combined(norms[mine], norm_type, groups)
        return norms


def _combined(norms: Tensor, norm_type: float, groups: Key) -> Tensor:
    is_largest = math.isinf(norm_type)
    powers = norms if is_largest else norms**norm_type
    for group in groups:
        dist.all_reduce(powers, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
    return powers if is_largest else powers ** (1.0 / norm_type)
