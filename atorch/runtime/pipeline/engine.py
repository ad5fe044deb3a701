"""Runs micro-batches through the stages, by torch's schedules.

Torch splits only the numbers of the micro-batches; their arguments are looked up, so they may be of any type. Each
shape of batches has its own schedule, as have passes without backward. The last few schedules are kept, with their
buffers. The order of passes is computed once for each number of micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import all_or_none
from atorch.errors import StrategyError
from atorch.model.state import preserved_state
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.loss.reduction import any_processes
from atorch.runtime.pipeline.placeholders import TensorSpec, shape_of, sizes_of
from atorch.runtime.pipeline.schedules import (
    ScheduleTemplate,
    StageSync,
    TorchStage,
    make_schedule,
    places_of,
    whole_batch,
)
from atorch.runtime.pipeline.stage import ModelStage, ShapeOracle, stage_of
from atorch.runtime.pipeline.stage_placement import PlacedSchedule

KEPT = 4
"""The number of cached schedules, each with the buffers of its micro-batches."""
KEPT_SHAPES = 64
"""The number of batch sizes for which the shapes sent between stages are cached."""

ModelArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of the model."""
Conclude = Callable[[int, Any], Tensor]
"""(number of the micro-batch, the model's output) → the last stage's result for the schedule."""


class PassWork(Protocol):
    """The work of a pass: code around each micro-batch's call of the model."""

    @property
    def count(self) -> int: ...

    @property
    def sizes(self) -> Hashable:
        """A key that is equal for passes whose stages send tensors of equal shapes."""

    def look(self, part: nn.Module) -> None:
        """Call a stage's model on the first micro-batch, without gradients, to observe its tensors."""

    def run(self, number: int, part: nn.Module) -> Any:
        """Call a stage's model on a micro-batch: returns its output, or, on the last stage, the micro-batch's loss."""


@dataclass(frozen=True)
class StageCalls:
    """Calls of the model; `conclude` runs on each output, on the last stage."""

    calls: Sequence[ModelArguments]
    conclude: Conclude

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def sizes(self) -> Hashable:
        """Sizes of the first call's arguments, which are equal for all calls."""
        return sizes_of(self.calls[0])

    def look(self, part: nn.Module) -> None:
        args, kwargs = self.calls[0]
        part(*args, **kwargs)

    def run(self, number: int, part: nn.Module) -> Any:
        args, kwargs = self.calls[number]
        output = part(*args, **kwargs)
        return self.conclude(number, output) if stage_of(part).is_last else output


@dataclass(frozen=True)
class _Job:
    work: PassWork
    shapes: Sequence[Sequence[TensorSpec]]
    failures: list[Exception] | None = None  # of a pass that all ranks end before any of them raises


class Engine:
    """The stages `parts` of this process, run together with those of the other processes of `group`."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: str | PlacedSchedule,
        group: dist.ProcessGroup,
        device: torch.device,
        oracle: ShapeOracle | None = None,
        replicas: dist.ProcessGroup | None = None,
        reductions: Sequence[StageSync] | None = None,
    ) -> None:
        """`oracle`: replaces the other processes in a fake world. `replicas`: the ranks with other batches.

        reductions: control the reduction of the parts' gradients; None: the default of each part.
        """
        self.parts, self.group, self.device = tuple(parts), group, device
        self.stages = [stage_of(part) for part in parts]
        self.reductions: Sequence[StageSync] = reductions or [GradientSync(part) for part in parts]
        self.places = places_of(schedule, self.stages[0].num_stages, group.size())
        self.last_place = self.places[-1]
        self._name, self.oracle = schedule, oracle
        # With sharded parameters, all ranks of a shard group must run the same passes.
        self._looks_with = replicas if any(reduction.is_sharded for reduction in self.reductions) else None
        self.pieces = [LocalStage(part, self) for part in parts]
        self._patterns: dict[tuple[str | PlacedSchedule, int, bool], ScheduleTemplate] = {}
        self._schedules: dict[Any, Any] = {}
        self._seen: dict[Any, list[Sequence[TensorSpec]]] = {}  # sizes of a call's arguments → shapes of its results
        self.job: _Job | None = None

    def run(self, work: PassWork, *, train: bool, whole: bool = False) -> None:
        """Run all micro-batches of `work`, which have equal shapes, through all stages.

        With `train`, the last stage returns the loss of a micro-batch, and `.grad` holds the gradients afterwards. With
        `whole`, all forward passes come before the first backward.

        Raises:
            StrategyError: the model calls its units differently on this batch than on the sample.
        """
        key = (train, whole, work.count, self._sizes(work))
        name = whole_batch(self._name) if whole and isinstance(self._name, str) else self._name
        numbers = torch.arange(work.count)
        first = [numbers] if self.stages[0].is_first else []
        with self.working_on(work) as shapes:
            cached = self._schedules.pop(key, None)
            schedule = cached or self._make(name, shapes, work.count, train)

            failures: list[Exception] = []
            # Failures on a single rank mostly occur in the first pass, or in evaluation.
            ends_together = self.oracle is None and (cached is None or not train)
            if ends_together:
                self.job = _Job(work, shapes, failures)
            try:
                schedule.step(*first, target=numbers, return_outputs=False, number=numbers)
            except RuntimeError as error:  # torch wraps the error of a pass in its own
                if error.__cause__ is not None:
                    raise error.__cause__ from None
                raise  # at once, also errors of backward: other ranks wait for this one
            if ends_together:
                all_or_none(functools.partial(_raise_first, failures), self.group)
        self._schedules[key] = schedule  # only now: the state of a schedule that failed is undefined
        if len(self._schedules) > KEPT:
            del self._schedules[next(iter(self._schedules))]

    @contextmanager
    def working_on(self, work: PassWork) -> Iterator[Sequence[Sequence[TensorSpec]]]:
        """Make `pieces` run the micro-batches of `work` inside; yields the shapes of the results of all calls."""
        sizes = self._sizes(work)
        shapes = self._seen.pop(sizes, None)
        is_new = shapes is None if self._looks_with is None else any_processes([shapes is None], self._looks_with)[0]
        if shapes is None or is_new:
            shapes = self._see(work)
        self._seen[sizes] = shapes
        if len(self._seen) > KEPT_SHAPES:
            del self._seen[next(iter(self._seen))]
        self.job = _Job(work, shapes)
        try:
            yield shapes
        finally:
            self.job = None

    def _sizes(self, work: PassWork) -> Hashable:
        """A key of the shapes between stages; they also depend on modes, where training drops tokens."""
        return work.sizes, tuple(module.training for module in self.parts[0].modules())

    def _make(
        self, name: str | PlacedSchedule, shapes: Sequence[Sequence[TensorSpec]], micro_batches: int, train: bool
    ) -> Any:
        key = name, micro_batches, train
        if key not in self._patterns:
            stages = self._torch_stages(name, shapes)
            self._patterns[key] = ScheduleTemplate(make_schedule(name, stages, micro_batches, train=train), stages)
        return self._patterns[key].on(self._torch_stages(name, shapes))

    def _torch_stages(self, name: str | PlacedSchedule, shapes: Sequence[Sequence[TensorSpec]]) -> list[TorchStage]:
        def described(stage: ModelStage, wires: Sequence[Any]) -> list[tuple[TensorSpec, bool]]:
            pairs = [(shapes[wire.call][wire.number], wire.call in stage.route.trained) for wire in wires]
            return [(shape, trained and shape.dtype.is_floating_point) for shape, trained in pairs]

        stages = []
        for piece, reduction, stage in zip(self.pieces, self.reductions, self.stages, strict=True):
            wires = described(stage, stage.incoming), described(stage, stage.outgoing)
            place = stage.index, stage.num_stages
            stages.append(TorchStage(name, piece, reduction, *place, *wires, self.device, self.group))
        return stages

    def _see(self, work: PassWork) -> list[Sequence[TensorSpec]]:
        """Run the stages one after another on a micro-batch, to observe the shapes of their results.

        Only the ranks of this pipeline fail together: others have other batches, and may have cached their shapes.
        """
        if self.oracle is not None:
            assert isinstance(work, StageCalls), "only strategies are simulated"
            return list(self.oracle.run(*work.calls[0])[0])
        table: list[Sequence[TensorSpec]] = []
        for index in range(self.stages[0].num_stages):
            box = [all_or_none(functools.partial(self._seen_by, index, work, table), self.group)]
            dist.broadcast_object_list(box, group=self.group, group_src=self.places[index])
            table += box[0]
        return table

    def _seen_by(self, index: int, work: PassWork, table: Sequence[Sequence[TensorSpec]]) -> list[list[TensorSpec]]:
        """The shapes that the calls of stage `index` return; empty where it is not on this process."""
        place = next((place for place, stage in enumerate(self.stages) if stage.index == index), None)
        if place is None:
            return []
        stage, part = self.stages[place], self.parts[place]
        wires = [table[value.call][value.number].zeros(self.device).clone() for value in stage.incoming]
        with (
            torch.no_grad(),
            preserved_state(part),
            self.reductions[place].forward(),
            stage.visit(wires, table) as visit,
        ):
            work.look(part)
        return visit.made


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


class LocalStage(nn.Module):
    """A stage as a schedule calls it: with the received tensors and the number of the micro-batch."""

    def __init__(self, part: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.part = part
        self._engine, self.stage = engine, stage_of(part)

    def forward(self, *wires: Tensor, number: Tensor) -> Any:
        """The inputs of the next stage, or the last stage's result."""
        stage, job = self.stage, self._engine.job
        assert job is not None, "only the engine runs schedules"
        try:
            with stage.visit(() if stage.is_first else wires, job.shapes):
                output = job.work.run(int(number), self.part)
            return output if stage.is_last else tuple(self._checked(output, job))
        except Exception as error:
            if job.failures is None:
                raise
            job.failures.append(error)  # raised after the pass, when no other stage waits for this one
            return self._nothing(wires, job)

    def _checked(self, output: Sequence[Tensor], job: _Job) -> Iterator[Tensor]:
        for value, tensor in zip(self.stage.outgoing, output, strict=True):
            expected = job.shapes[value.call][value.number]
            if shape_of(tensor) != expected:
                raise StrategyError(
                    f"{self.stage.route.calls[value.call].unit} returns {tuple(tensor.shape)} of {tensor.dtype}, and "
                    f"the stage after it expects {expected.sizes} of {expected.dtype}, as the sizes of the batch "
                    "differ from those of the first one. Give batches of one length, or set split_points elsewhere"
                )
            yield tensor.contiguous()

    def _nothing(self, wires: Sequence[Tensor], job: _Job) -> Any:
        """Zeros instead of a failed stage's outputs, connected to its inputs so that backward sends zeros."""
        zero = torch.zeros((), device=self._engine.device, requires_grad=torch.is_grad_enabled())
        zero = sum((wire.sum() * 0 for wire in wires if wire.requires_grad), zero)
        if self.stage.is_last:
            return zero
        zeros = [job.shapes[value.call][value.number].zeros(self._engine.device) for value in self.stage.outgoing]
        return tuple(item + zero.to(item.dtype) if item.is_floating_point() else item.contiguous() for item in zeros)
