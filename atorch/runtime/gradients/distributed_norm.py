"""Norms of a model's parameters and gradients, of which this process may have parts alone."""

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
    """The parts of a spread model that other processes have; without arguments, nothing.

    What a DTensor's placements say needs no saying here.

    over: groups whose ranks have other parameters each, such as the stages of a pipeline.
    parts: of plain tensors that are parts of one parameter, the groups whose ranks have the other parts.
    counted_elsewhere: parameters that another rank of `over` has, too, and counts.
    """

    over: Sequence[dist.ProcessGroup] = ()
    parts: Mapping[Tensor, Key] = field(default_factory=dict)
    counted_elsewhere: Collection[Tensor] = ()

    def norm_of_grads(self, parameters: Iterable[Tensor]) -> Tensor:
        """The L2 norm of all gradients of the model together, where `parameters` are those of this process, in fp32.

        All ranks call it together.
        """
        return norm_of_grads(parameters, 2.0, self.over, self.parts, self.counted_elsewhere)

    def norms(self, values: Sequence[Tensor], parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of each whole value, `(len(values),)`, of which this process has a part as large as the parameter's.

        `values` are plain tensors on one device. The ranks that have parts of the same parameters call it together.
        """
        # The largest of nothing is no number.
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
