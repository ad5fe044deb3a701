"""The assignment of stages to processes, and torch's schedules of their passes.

    gpipe         all forward passes, then all backward passes (Huang et al. 2018, arXiv 1811.06965)
    1f1b          backward as soon as it can be, so that a stage holds fewer micro-batches (Narayanan et al. 2021,
                  arXiv 2104.04473)
    interleaved   1f1b with several pieces of the model on each process: process i has stages i, i + p, i + 2p, …
    zero_bubble   backward in two halves; the half for the weights fills idle gaps (Qi et al. 2023, arXiv
                  2401.10241, ZB-H1)

Where a loss needs all micro-batches at once, gpipe runs instead, or "looped" for several pieces.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.runtime.pipeline.placeholders import TensorSpec
from atorch.runtime.pipeline.stage_placement import PlacedSchedule, turns

Users = Mapping[Node, list[Node]]
"""For each node of an autograd graph, the nodes from which backward reaches it."""


def comes_apart(outputs: Iterable[Any], inputs: Iterable[Any], weights: Iterable[Any]) -> bool:
    """True if torch can split backward from `outputs`: gradients of `inputs` now, and of the leaves `weights` later.

    On its way to the inputs (the *stem*) torch records the gradient at each *branch*. A branch is an operation with a
    path to a weight that leaves the stem. It later starts there (`stage_backward_weight`). This second walk frees
    buffers too early if weights share some branches but not all, or if one branch of a weight reaches another. So a
    weight that is used twice, one use after the other, prevents the split, as do position biases that all blocks share.
    A weight whose paths meet those of no input has no branch, and would get no gradient.
    """
    users = _users(_nodes(outputs))
    stem = _walk(_nodes(inputs), lambda node: users.get(node, ()))
    branches = {_branches(node, users, stem) for node in _nodes(weights) if node in users}
    are_disjoint = len(frozenset().union(*branches)) == sum(map(len, branches))
    return all(branches) and are_disjoint and not any(_reach_another(nodes) for nodes in branches)


def _nodes(values: Iterable[Any]) -> list[Node]:
    """The nodes where backward begins, of tensors, or of gradient edges that replace freed tensors."""
    edges = (get_gradient_edge(item) if isinstance(item, Tensor) and item.requires_grad else item for item in values)
    return [edge.node for edge in edges if isinstance(edge, GradientEdge)]


def _users(roots: Iterable[Node]) -> Users:
    users: dict[Node, list[Node]] = defaultdict(list)
    for node in _walk(roots, _next):
        for other in _next(node):
            users[other].append(node)
    return users


def _branches(weight: Node, users: Users, stem: Collection[Node]) -> frozenset[Node]:
    """The nodes of the stem from which paths to a weight leave it."""
    off_stem = _walk([weight], lambda node: (other for other in users.get(node, ()) if other not in stem))
    return frozenset(other for node in off_stem for other in users.get(node, ()) if other in stem)


def _reach_another(branches: frozenset[Node]) -> bool:
    if len(branches) == 1:
        return False
    below = _walk((other for node in branches for other in _next(node)), _next)
    return not branches.isdisjoint(below)


def _next(node: Node) -> Iterable[Node]:
    return (other for other, _ in node.next_functions if other is not None)


def _walk(starts: Iterable[Node], onwards: Any) -> set[Node]:
    """All nodes that are reachable from `starts`, including these."""
    visited, waiting = set[Node](), list(starts)
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            waiting.extend(onwards(node))
    return visited


def stages_of(place: int, size: int, pieces: int) -> tuple[int, ...]:
    """The stages of process `place` of `size`, with `pieces` stages on each."""
    return tuple(place + size * number for number in range(pieces))


def places_of(schedule: str | PlacedSchedule, num_stages: int, size: int) -> tuple[int, ...]:
    """The process of each stage, of `size` processes."""
    return tuple(stage % size for stage in range(num_stages)) if isinstance(schedule, str) else schedule.places


class StageSync(Protocol):
    """Controls the reduction of a stage's gradients: `gradient_sync.GradientSync`, or another implementation."""

    @property
    def is_sharded(self) -> bool:
        """True if a forward pass gathers parameters from other ranks."""

    def forward(self) -> AbstractContextManager[None]: ...

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of the backward pass of an earlier forward pass; the last one reduces gradients."""

    def afterwards(self) -> None:
        """Reduce the gradients of backward passes none of which was the last."""

    def reshard(self) -> None:
        """Free gathered parameters after a forward pass that no backward follows."""

    def takes(self, error: Exception) -> bool:
        """True if the owner raises the error of a backward pass later, so that the schedule goes on with zeros."""


class TorchStage(PipelineStage):
    """Stage `index` for torch's schedules, whose gradients `reduction` reduces.

    `incoming` and `outgoing` have the shape of each tensor, and True where it has a gradient. With these torch need not
    exchange shapes. The first stage takes the number of the micro-batch, and the last one returns its loss.
    """

    def __init__(
        self,
        schedule: str | PlacedSchedule,
        module: nn.Module,
        reduction: StageSync,
        index: int,
        num_stages: int,
        incoming: Sequence[tuple[TensorSpec, bool]],
        outgoing: Sequence[tuple[TensorSpec, bool]],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        takes = [torch.zeros(1, dtype=torch.int64)] if index == 0 else [_empty(*wire) for wire in incoming]
        gives = [torch.zeros((), device="meta")] if index == num_stages - 1 else [_empty(*wire) for wire in outgoing]
        super().__init__(
            module, index, num_stages, device, input_args=tuple(takes), output_args=tuple(gives), group=group
        )
        self.stage_index_to_group_rank = dict(enumerate(places_of(schedule, num_stages, group.size())))
        self._reduction = reduction
        # Weights' gradients are then computed without autograd's hooks, which cannot reduce them.
        self._splits_backward = schedule == "zero_bubble"
        self._comes_apart: bool | None = None  # set with the first micro-batch

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._reduction.forward():
            return self.submod(*args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        """Run backward of one micro-batch, or a half; the first half runs all if backward cannot be split."""
        if backward_type == "input" and not self._in_halves(bwd_kwargs):
            backward_type = "full"
            if bwd_kwargs["output_grads"] is None:
                bwd_kwargs = {**bwd_kwargs, "stage_output": bwd_kwargs["stage_output"][0]}  # the loss
        elif backward_type == "weight" and bwd_kwargs["param_groups"] is None:
            return (), None
        try:
            with self._reduction.backward(last=last_backward and not self._splits_backward):
                return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        except Exception as error:
            if not self._reduction.takes(error):
                raise
            inputs = bwd_kwargs["input_values"]
            return tuple(torch.zeros_like(value) if value.requires_grad else None for value in inputs), None

    def _in_halves(self, kwargs: Mapping[str, Any]) -> bool:
        if self._comes_apart is None:
            self._comes_apart = comes_apart(kwargs["stage_output"], kwargs["input_values"], self.submod.parameters())
            if not self._comes_apart:
                logger.info(
                    "stage %d of the pipeline goes backward as a whole: a weight of it is used several times",
                    self.stage_index,
                )
        return self._comes_apart

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self._splits_backward and self.has_backward:
            self._reduction.afterwards()


def _empty(shape: TensorSpec, has_gradient: bool) -> torch.Tensor:
    return torch.empty(shape.sizes, dtype=shape.dtype, device="meta", requires_grad=has_gradient)


def whole_batch(name: str) -> str:
    """The schedule with all forward passes before the first backward, for the stage assignment of schedule `name`."""
    return "looped" if name == "interleaved" else "gpipe"


def make_schedule(name: str | PlacedSchedule, stages: Sequence[TorchStage], micro_batches: int, *, train: bool) -> Any:
    """Torch's schedule of that name; without `train` forward passes only.

    1F1B needs at least as many micro-batches as stages; with fewer this returns GPipe.
    """
    options: dict[str, Any] = {"scale_grads": False}
    if train:
        options["loss_fn"] = _same
    if isinstance(name, PlacedSchedule):
        return _PlacedSchedule(name, stages, micro_batches, options)
    if name == "looped":
        return ScheduleLoopedBFS(list(stages), micro_batches, **options)
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), micro_batches, **options)
    if name == "zero_bubble" and train:
        return ScheduleInterleavedZeroBubble(list(stages), micro_batches, **options)
    (stage,) = stages
    if name == "gpipe" or not train or micro_batches < stage.num_stages:
        return ScheduleGPipe(stage, micro_batches, **options)
    return Schedule1F1B(stage, micro_batches, **options)


class _PlacedSchedule(_PipelineScheduleRuntime):
    """Torch's runtime with the order of `PlacedSchedule`; the runtime derives the sends and receives."""

    def __init__(
        self, placed: PlacedSchedule, stages: Sequence[TorchStage], micro_batches: int, options: dict[str, Any]
    ) -> None:
        super().__init__(list(stages), micro_batches, **options)  # type: ignore[no-untyped-call]
        kinds = {False: _ComputationType.FORWARD, True: _ComputationType.FULL_BACKWARD}
        order = turns(placed, micro_batches)
        self.pipeline_order = {
            place: [_Action(turn.stage, kinds[turn.is_backward], turn.number) for turn in passes]
            for place, passes in enumerate(order)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


@dataclass(frozen=True)
class ScheduleTemplate:
    """A template schedule, never run itself, and its stages: the schedules that run are copies, on other stages.

    The order of passes depends only on the numbers of stages and micro-batches, and torch may take seconds to compute
    it. Copies share its tables, which no step writes to.
    """

    schedule: Any
    stages: Sequence[TorchStage]

    def on(self, stages: Sequence[TorchStage]) -> Any:
        """A copy of the schedule on other `stages`."""
        memo: dict[int, Any] = {id(stage): other for stage, other in zip(self.stages, stages, strict=True)}
        for table in vars(self.schedule).values():
            if isinstance(table, dict) and any(isinstance(row, list) and row for row in table.values()):
                memo[id(table)] = table
        return copy.deepcopy(self.schedule, memo)


def _same(loss: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Loss function for torch: the last stage's output is the loss already."""
    return loss


PassKind = Literal["forward", "backward", "input", "weight"]


KINDS: Mapping[str, PassKind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}
"""Torch's names of the kinds of passes; its plan also has other actions, such as reductions of gradients."""


class StagePass(NamedTuple):
    """One pass of one micro-batch through one stage: forward, backward, or backward of only inputs or weights."""

    kind: PassKind
    stage: int
    micro_batch: int


def order(schedule: str, processes: int, micro_batches: int, pieces: int = 1) -> list[list[StagePass]]:
    """The passes of each process under the schedule of that name, with `pieces` stages on each process.

    Raises:
        StrategyError: torch's schedule does not accept this number of micro-batches.
    """
    facts = {"num_stages": processes * pieces, "group_size": processes, "group_rank": 0, "submod": None}
    stages: list[Any] = [SimpleNamespace(stage_index=index, **facts) for index in stages_of(0, processes, pieces)]
    try:
        plan = make_schedule(schedule, stages, micro_batches, train=True).pipeline_order
    except ValueError as error:
        raise StrategyError(
            f"{micro_batches} micro-batches do not go with the schedule {schedule} on {processes} processes; give "
            f"a multiple of {processes} (torch: {error})"
        ) from error
    return [_numbered(plan[place]) for place in range(processes)]


def _numbered(actions: Sequence[Any]) -> list[StagePass]:
    """Number micro-batches by their order in each stage: under 1f1b torch numbers those of the last differently."""
    done: Counter[tuple[PassKind, int]] = Counter()
    passes = []
    for action in actions:
        if action is None or action.computation_type.name not in KINDS:  # idle, or no pass
            continue
        key = KINDS[action.computation_type.name], action.stage_index
        passes.append(StagePass(*key, done[key]))
        done[key] += 1
    return passes
