"""Parameters that several stages hold: tied weights, modules that are called twice, parameters outside of units.

Each stage that holds one has the gradient of its own use. Their sum, in the same order everywhere, keeps copies equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.runtime.optimizer.wrapped_optimizer import local
from atorch.runtime.pipeline.stage import stage_of

Shared = Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
"""For each parameter that several stages hold: all its names, and the stages, ascending."""


class Ties:
    """The shared parameters of the stages `parts` on this process; `places` are the processes of all stages."""

    def __init__(
        self, shared: Shared, parts: Sequence[nn.Module], group: dist.ProcessGroup, places: Sequence[int]
    ) -> None:
        self._group = group
        self._ties: list[tuple[list[int], list[Tensor]]] = []  # (processes, copies on this one)
        self.counted_elsewhere: set[Tensor] = set()
        named = {stage_of(part).index: dict(part.named_parameters(remove_duplicate=False)) for part in parts}
        for names, stages in shared:
            local_stages = [stage for stage in stages if stage in named]
            copies: list[Tensor] = list(
                {id(tensor): tensor for tensor in (_copy(named[stage], names) for stage in local_stages)}.values()
            )
            processes = sorted({places[stage] for stage in stages})
            if copies and copies[0].requires_grad and len(processes) + len(copies) > 2:
                self._ties.append((processes, copies))
                self.counted_elsewhere.update(copies[stages[0] in local_stages :])  # the first stage's counts

    @property
    def parameters(self) -> list[Tensor]:
        """The copies on this process."""
        return [parameter for _, copies in self._ties for parameter in copies]

    @torch.no_grad()
    def add_up(self) -> None:
        """Set the gradient of every copy to the sum over all copies."""
        with torch._C.DisableTorchFunctionSubclass():  # as subclasses, gradients of a stage refuse to be added up
            for places, copies in self._ties:
                gradients = [_gradient(parameter) for parameter in copies]
                local_sum = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
                sums = self._exchanged(local_sum.contiguous(), places)
                total = torch.stack(sums).sum(0) if len(sums) > 1 else local_sum
                for gradient in gradients:
                    gradient.copy_(total)

    def _exchanged(self, own: Tensor, places: Sequence[int]) -> list[Tensor]:
        """The tensors of all processes in `places`, in that order."""
        here, group = self._group.rank(), self._group
        tensors = [own if place == here else torch.empty_like(own) for place in places]
        exchanges = [
            dist.P2POp(operation, tensor, group=group, group_peer=place)
            for place, other in zip(places, tensors, strict=True)
            if place != here
            for operation, tensor in ((dist.isend, own), (dist.irecv, other))
        ]
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
        return tensors


def _copy(parameters: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return next(parameters[name] for name in names if name in parameters)


def _gradient(parameter: Tensor) -> Tensor:
    """The local part of a parameter's gradient; first sets it to zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return local(parameter.grad)
