"""Stages on processes: any placement, the order of their passes, and the parameters that several stages hold.

A process may have several stages, anywhere in the model. A simulation of the step gives the order of its passes. A
forward pass takes one unit of time, a backward pass two. A free process runs the first pass that is ready. Backward
passes come before forward passes (1F1B, Narayanan et al. 2021, arXiv 2104.04473) or, in rounds, after all forward
passes of a round (GPipe, Huang et al. 2018, arXiv 1811.06965). A micro-batch starts when fewer than `active` are in
flight.

Several stages hold tied weights, modules that are called twice, and parameters outside of units. Each has the gradient
of its own use. Their sum, in the same order everywhere, keeps copies equal.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.runtime.optimizer.wrapped_optimizer import local
from atorch.runtime.pipeline.stage import stage_of


@dataclass(frozen=True)
class PlacedSchedule:
    """The process of each stage, and the largest number of micro-batches in flight.

    rounds: all forward passes of `active` micro-batches come before their first backward.
    """

    places: tuple[int, ...]
    active: int
    rounds: bool = False


def by_torch(placed: PlacedSchedule, micro_batches: int) -> str | PlacedSchedule:
    """The name of torch's equivalent schedule, which costs the host less; `placed` itself where there is none.

    Torch's 1F1B has as many micro-batches in flight as stages, its GPipe all.
    """
    num_stages = len(placed.places)
    if placed.places != tuple(range(num_stages)):
        return placed
    if placed.rounds:
        return "gpipe" if placed.active >= micro_batches else placed
    return "1f1b" if placed.active >= num_stages else placed


class PassSlot(NamedTuple):
    """A pass of a micro-batch through a stage."""

    is_backward: bool
    stage: int
    number: int


def turns(placed: PlacedSchedule, micro_batches: int) -> list[list[PassSlot]]:
    """The passes of each process, in order; without training, torch leaves out the backward passes."""
    progress = _Progress(placed, micro_batches)
    order: list[list[PassSlot]] = [[] for _ in range(max(placed.places) + 1)]
    running: list[tuple[int, int, PassSlot]] = []  # (when it ends, process, pass)
    busy: set[int] = set()
    now = 0
    while True:
        for place in range(len(order)):
            turn = progress.next(place) if place not in busy else None
            if turn is not None:
                progress.begin(turn)
                busy.add(place)
                order[place].append(turn)
                heapq.heappush(running, (now + (2 if turn.is_backward else 1), place, turn))
        if not running:
            return order
        now = running[0][0]
        while running and running[0][0] == now:  # end all that end now, before a process chooses its next pass
            _, place, turn = heapq.heappop(running)
            busy.remove(place)
            progress.end(turn)


class _Progress:
    """The progress of each stage. Micro-batches pass a stage in their order, forward and backward."""

    def __init__(self, placed: PlacedSchedule, micro_batches: int) -> None:
        self._placed, self._count = placed, micro_batches
        self._last = len(placed.places) - 1
        self._begun: dict[bool, list[int]] = {way: [0] * (self._last + 1) for way in (False, True)}
        self._ended: dict[bool, list[int]] = {way: [0] * (self._last + 1) for way in (False, True)}

    def begin(self, turn: PassSlot) -> None:
        self._begun[turn.is_backward][turn.stage] += 1

    def end(self, turn: PassSlot) -> None:
        self._ended[turn.is_backward][turn.stage] += 1

    def next(self, place: int) -> PassSlot | None:
        """The next pass of a free process; None where none is ready."""
        stages = [stage for stage in range(self._last, -1, -1) if self._placed.places[stage] == place]
        return next(self._ready(stages), None)

    def _ready(self, stages: Sequence[int]) -> Iterator[PassSlot]:
        for is_backward in (False, True) if self._placed.rounds else (True, False):
            for stage in stages:
                number = self._begun[is_backward][stage]
                if number < self._count and (self._goes_back if is_backward else self._goes_on)(stage, number):
                    yield PassSlot(is_backward, stage, number)

    def _goes_on(self, stage: int, number: int) -> bool:
        if stage:
            return self._ended[False][stage - 1] > number
        done, active = self._ended[True][0], self._placed.active
        return number < (done // active + 1) * active if self._placed.rounds else number < done + active

    def _goes_back(self, stage: int, number: int) -> bool:
        if stage < self._last and self._ended[True][stage + 1] <= number:
            return False
        active = self._placed.active
        round_end = min(self._count, (number // active + 1) * active) if self._placed.rounds else number + 1
        return self._ended[False][stage] >= round_end


Shared = Sequence[tuple[tuple[str, ...], tuple[int, ...]]]
"""For each parameter that several stages hold: all its names, and the stages, ascending."""


class SharedParameters:
    """The shared parameters of the stages `parts` on this process; `places` are the processes of all stages."""

    def __init__(
        self, shared: Shared, parts: Sequence[nn.Module], group: dist.ProcessGroup, places: Sequence[int]
    ) -> None:
        self._group, self.names = group, [names for names, _ in shared]
        self._ties: list[tuple[list[int], list[Tensor]]] = []  # (processes, copies on this one)
        self.counted_elsewhere: set[Tensor] = set()
        named = {stage_of(part).index: dict(part.named_parameters(remove_duplicate=False)) for part in parts}
        for names, stages in shared:
            local_stages = [stage for stage in stages if stage in named]
            held = [next(named[stage][name] for name in names if name in named[stage]) for stage in local_stages]
            copies: list[Tensor] = list({id(tensor): tensor for tensor in held}.values())
            processes = sorted({places[stage] for stage in stages})
            if copies and copies[0].requires_grad and len(processes) + len(copies) > 2:
                self._ties.append((processes, copies))
                self.counted_elsewhere.update(copies[stages[0] in local_stages :])  # the first stage's counts

    @property
    def parameters(self) -> list[Tensor]:
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

    def _exchanged(self, local: Tensor, places: Sequence[int]) -> list[Tensor]:
        """The tensors of all processes in `places`, in that order."""
        here, group = self._group.rank(), self._group
        tensors = [local if place == here else torch.empty_like(local) for place in places]
        exchanges = [
            dist.P2POp(operation, tensor, group=group, group_peer=place)
            for place, other in zip(places, tensors, strict=True)
            if place != here
            for operation, tensor in ((dist.isend, local), (dist.irecv, other))
        ]
        for work in dist.batch_isend_irecv(exchanges) if exchanges else ():
            work.wait()
        return tensors


def _gradient(parameter: Tensor) -> Tensor:
    """The local part of a parameter's gradient; first sets it to zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return local(parameter.grad)
