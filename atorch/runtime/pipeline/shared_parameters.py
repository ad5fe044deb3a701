"""Parameters that several stages hold: tied weights, a module that is called twice, what lies outside of units.

Each stage that holds one has the gradient of its own use. The sum, in one order everywhere, keeps all copies equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.runtime.optimizer.wrapped_optimizer import local
from atorch.runtime.pipeline.stage import stage_of

Shared = Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
"""For each parameter that several stages hold all its names, and the stages, ascending."""


class Ties:
    """The shared parameters that the stages `parts` of this process hold; `places` have the stages, in order."""

    def __init__(
        self, shared: Shared, parts: Sequence[nn.Module], group: dist.ProcessGroup, places: Sequence[int]
    ) -> None:
        self._group = group
        self._ties: list[tuple[list[int], list[Tensor]]] = []  # (processes, this one's copies)
        self.counted_elsewhere: set[Tensor] = set()
        named = {stage_of(part).index: dict(part.named_parameters(remove_duplicate=False)) for part in parts}
        for names, stages in shared:
            mine = [stage for stage in stages if stage in named]
            copies: list[Tensor] = list(
                {id(each): each for each in (_copy(named[stage], names) for stage in mine)}.values()
            )
            held_at = sorted({places[stage] for stage in stages})
            if copies and copies[0].requires_grad and len(held_at) + len(copies) > 2:
                self._ties.append((held_at, copies))
                self.counted_elsewhere.update(copies[stages[0] in mine :])

    @property
    def parameters(self) -> list[Tensor]:
        """The copies that are on this process."""
        return [each for _, copies in self._ties for each in copies]

    @torch.no_grad()
    def add_up(self) -> None:
        """Let every copy's gradient be the sum of all."""
        with torch._C.DisableTorchFunctionSubclass():  # gradients of a stage refuse to be added up by a loop
            for places, copies in self._ties:
                gradients = [_gradient(each) for each in copies]
                own = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
                found = self._exchanged(own.contiguous(), places)
                total = torch.stack(found).sum(0) if len(found) > 1 else own
                for gradient in gradients:
                    gradient.copy_(total)

    def _exchanged(self, own: Tensor, places: Sequence[int]) -> list[Tensor]:
        """The values of each of the processes, in their order."""
        here, group = self._group.rank(), self._group
        found = [own if place == here else torch.empty_like(own) for place in places]
        exchanges = [
            dist.P2POp(operation, tensor, group=group, group_peer=place)
            for place, other in zip(places, found, strict=True)
            if place != here
            for operation, tensor in ((dist.isend, own), (dist.irecv, other))
        ]
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
        return found


def _copy(parameters: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return next(parameters[name] for name in names if name in parameters)


def _gradient(parameter: Tensor) -> Tensor:
    """This process's part of a parameter's gradient, zeros where nothing has reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return local(parameter.grad)
