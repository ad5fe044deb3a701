"""Runs micro-batches through the stages, by torch's schedules.

What travels through torch's splitting is the number of a micro-batch; its arguments are looked up, so they may be
anything. Batches of another shape, and passes without backward, get schedules of their own, of which the last few are
kept, for their buffers; in which order passes come is found out once for each number of micro-batches.
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

from atorch.distributed.collectives import together
from atorch.errors import StrategyError
from atorch.model.state import untouched
from atorch.runtime.data_parallel.gradient_sync import Reduction
from atorch.runtime.loss.reduction import any_processes
from atorch.runtime.pipeline.capture.shapes import TensorSpec, shape_of, sizes_of
from atorch.runtime.pipeline.schedules import (
    Pattern,
    StageReduction,
    TorchStage,
    make_schedule,
    places_of,
    torch_stage,
    whole_batch,
)
from atorch.runtime.pipeline.shape_oracle import ShapeOracle
from atorch.runtime.pipeline.stage import ModelStage, stage_of
from atorch.runtime.pipeline.stage_placement import PlacedSchedule

KEPT = 4
"""Schedules, with the buffers of their micro-batches."""
KEPT_SHAPES = 64
"""Sizes of batches of which it is kept what crosses between stages."""

ModelArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of the model."""
Conclude = Callable[[int, Any], Tensor]
"""(number of the micro-batch, the model's output) → what the last stage gives to the schedule."""


class PassWork(Protocol):
    """The work of a pass: something around each micro-batch's call of the model."""

    @property
    def count(self) -> int: ...

    @property
    def sizes(self) -> Hashable:
        """Passes whose sizes are equal hand over tensors of equal shapes."""
        ...

    def look(self, part: nn.Module) -> None:
        """Call a stage's model on the first micro-batch, without gradients, to see what it makes."""
        ...

    def run(self, number: int, part: nn.Module) -> Any:
        """Call a stage's model on a micro-batch: what that gives, or, of the last stage, the micro-batch's loss."""
        ...


@dataclass(frozen=True)
class StageCalls:
    """Calls of the model, each of which is concluded where the output is made."""

    calls: Sequence[ModelArguments]
    conclude: Conclude

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def sizes(self) -> Hashable:
        """Sizes of the first call's arguments; all calls are of equal sizes."""
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
    failures: list[Exception] | None = None  # of a pass that all processes end before one of them raises


class Engine:
    """The stages `parts` of this process, which are run together with those of the other processes of `group`."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        schedule: str | PlacedSchedule,
        group: dist.ProcessGroup,
        device: torch.device,
        understudy: ShapeOracle | None = None,
        replicas: dist.ProcessGroup | None = None,
        reductions: Sequence[StageReduction] | None = None,
    ) -> None:
        """`understudy`: speaks for the other processes, where they are fake ones. `replicas`: who has other batches.

        reductions: of the parts' gradients; None: as each part reduces by itself.
        """
        self.parts, self.group, self.device = tuple(parts), group, device
        self.stages = [stage_of(part) for part in parts]
        self.reductions: Sequence[StageReduction] = reductions or [Reduction(part) for part in parts]
        self.places = places_of(schedule, self.stages[0].num_stages, group.size())
        self.last_place = self.places[-1]
        self._name, self.understudy = schedule, understudy
        # Where parameters are shards, a pass that one process makes, all that hold them have to make.
        self._looks_with = replicas if any(each.is_sharded for each in self.reductions) else None
        self.pieces = [LocalStage(part, self) for part in parts]
        self._patterns: dict[tuple[str | PlacedSchedule, int, bool], Pattern] = {}
        self._schedules: dict[Any, Any] = {}
        self._seen: dict[Any, list[Sequence[TensorSpec]]] = {}  # sizes of a call's arguments → shapes that it makes
        self.job: _Job | None = None

    @property
    def has_last(self) -> bool:
        """True if the model's output is made on this process."""
        return self.group.rank() == self.last_place

    def run(self, calls: Sequence[ModelArguments], conclude: Conclude, *, train: bool, whole: bool = False) -> None:
        """One pass of all micro-batches `calls`, which are equal in shape, through all stages.

        With `train`, what `conclude` returns is the loss of a micro-batch, and gradients are left in `.grad`. With
        `whole`, all forward passes come before the first backward.

        Raises:
            StrategyError: the model does not do on this batch what it did on the sample.
        """
        self.run_work(StageCalls(calls, conclude), train=train, whole=whole)

    def run_work(self, work: PassWork, *, train: bool, whole: bool = False) -> None:
        """The same with anything around the calls of the model."""
        key = (train, whole, work.count, work.sizes)
        name = whole_batch(self._name) if whole and isinstance(self._name, str) else self._name
        numbers = torch.arange(work.count)
        first = [numbers] if self.stages[0].is_first else []
        with self.working_on(work) as shapes:
            known = self._schedules.pop(key, None)
            schedule = known or self._make(name, shapes, work.count, train)

            failures: list[Exception] = []
            # What fails on one process alone mostly does so at first, or in evaluation.
            ends_together = self.understudy is None and (known is None or not train)
            if ends_together:
                self.job = _Job(work, shapes, failures)
            try:
                schedule.step(*first, target=numbers, return_outputs=False, number=numbers)
            except RuntimeError as error:  # torch puts what a pass raised behind one of its own
                if error.__cause__ is not None:
                    raise error.__cause__ from None
                raise  # at once, what backward raised among it: others wait for this process
            if ends_together:
                together(functools.partial(_raise_first, failures), self.group)
        self._schedules[key] = schedule  # only now: one that failed is in no state to go on
        if len(self._schedules) > KEPT:
            del self._schedules[next(iter(self._schedules))]

    @contextmanager
    def working_on(self, work: PassWork) -> Iterator[Sequence[Sequence[TensorSpec]]]:
        """Inside, `pieces` run the micro-batches of `work`; gives the shapes of what the model's calls return."""
        shapes = self._seen.pop(work.sizes, None)
        is_new = shapes is None if self._looks_with is None else any_processes([shapes is None], self._looks_with)[0]
        if shapes is None or is_new:
            shapes = self._see(work)
        self._seen[work.sizes] = shapes
        if len(self._seen) > KEPT_SHAPES:
            del self._seen[next(iter(self._seen))]
        self.job = _Job(work, shapes)
        try:
            yield shapes
        finally:
            self.job = None

    def _make(
        self, name: str | PlacedSchedule, shapes: Sequence[Sequence[TensorSpec]], micro_batches: int, train: bool
    ) -> Any:
        key = name, micro_batches, train
        if key not in self._patterns:
            stages = self._torch_stages(name, shapes)
            self._patterns[key] = Pattern(make_schedule(name, stages, micro_batches, train=train), stages)
        return self._patterns[key].on(self._torch_stages(name, shapes))

    def _torch_stages(self, name: str | PlacedSchedule, shapes: Sequence[Sequence[TensorSpec]]) -> list[TorchStage]:
        def described(stage: ModelStage, wires: Sequence[Any]) -> list[tuple[TensorSpec, bool]]:
            found = [(shapes[wire.call][wire.number], wire.call in stage.route.trained) for wire in wires]
            return [(shape, trained and shape.dtype.is_floating_point) for shape, trained in found]

        return [
            torch_stage(
                name,
                piece,
                reduction,
                stage.index,
                stage.num_stages,
                described(stage, stage.incoming),
                described(stage, stage.outgoing),
                self.device,
                self.group,
            )
            for piece, reduction, stage in zip(self.pieces, self.reductions, self.stages, strict=True)
        ]

    def _see(self, work: PassWork) -> list[Sequence[TensorSpec]]:
        """Run the stages one after another on a micro-batch, to see the shapes that they give.

        The processes of this pipeline fail together. Others have other batches, and may know the shapes of theirs.
        """
        if self.understudy is not None:
            assert isinstance(work, StageCalls), "only strategies are simulated"
            return list(self.understudy.run(*work.calls[0])[0])
        table: list[Sequence[TensorSpec]] = []
        for index in range(self.stages[0].num_stages):
            box = [together(functools.partial(self._seen_by, index, work, table), self.group)]
            dist.broadcast_object_list(box, group=self.group, group_src=self.places[index])
            table += box[0]
        return table

    def _seen_by(self, index: int, work: PassWork, table: Sequence[Sequence[TensorSpec]]) -> list[list[TensorSpec]]:
        """Shapes that the calls of stage `index` return, where it is on this process."""
        place = next((place for place, stage in enumerate(self.stages) if stage.index == index), None)
        if place is None:
            return []
        stage, part = self.stages[place], self.parts[place]
        wires = [table[value.call][value.number].stand_in(self.device).clone() for value in stage.incoming]
        with torch.no_grad(), untouched(part), self.reductions[place].forward(), stage.visit(wires, table) as visit:
            work.look(part)
        return visit.made


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


class LocalStage(nn.Module):
    """A stage as a schedule calls it: with what came in and the number of the micro-batch."""

    def __init__(self, part: nn.Module, engine: Engine) -> None:
        super().__init__()
        self.part = part
        self._engine, self.stage = engine, stage_of(part)

    def forward(self, *wires: Tensor, number: Tensor) -> Any:
        """The input of the next stage, or the last one's result."""
        stage, job = self.stage, self._engine.job
        assert job is not None, "only the engine runs schedules"
        try:
            with stage.visit(() if stage.is_first else wires, job.shapes):
                output = job.work.run(int(number), self.part)
        except Exception as error:
            if job.failures is None:
                raise
            job.failures.append(error)  # raised when other stages do not wait for what this one sends any more
            return self._nothing(wires, job)
        if stage.is_last:
            return output
        for value, tensor in zip(stage.outgoing, output, strict=True):
            expected = job.shapes[value.call][value.number]
            if shape_of(tensor) != expected:
                raise StrategyError(
                    f"{stage.route.calls[value.call].unit} returns {tuple(tensor.shape)} of {tensor.dtype}, and the "
                    f"stage after it expects {expected.sizes} of {expected.dtype}, as the sizes of the batch differ "
                    "from those of the first one. Give batches of one length, or set split_points elsewhere"
                )
        return tuple(tensor.contiguous() for tensor in output)

    def _nothing(self, wires: Sequence[Tensor], job: _Job) -> Any:
        """Zeros in the place of what a failed stage would have made, by which zeros come back in backward."""
        zero = torch.zeros((), device=self._engine.device, requires_grad=torch.is_grad_enabled())
        zero = sum((wire.sum() * 0 for wire in wires if wire.requires_grad), zero)
        if self.stage.is_last:
            return zero
        made = [job.shapes[value.call][value.number].stand_in(self._engine.device) for value in self.stage.outgoing]
        return tuple(each + zero.to(each.dtype) if each.is_floating_point() else each.contiguous() for each in made)
