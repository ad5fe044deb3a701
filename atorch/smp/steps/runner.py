"""Runs the micro-batches of a step through the parts of a model, and averages gradients over replicas.

If a process raises in a step, all raise. It continues with zeros, so that its pipeline and the other replicas do not
block. The exchange at the end of the step reports the error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import all_or_none, all_reduce_max, first_not_none
from atorch.distributed.fingerprints import hash_pair
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger
from atorch.model.pytree import map_tensors
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.pipeline.engine import Engine
from atorch.runtime.pipeline.pipeline import from_place
from atorch.runtime.pipeline.placeholders import sizes_of
from atorch.runtime.pipeline.stage import stage_of
from atorch.runtime.pipeline.stage_placement import PlacedSchedule, SharedParameters, turns
from atorch.smp.model import DistributedModel
from atorch.smp.session import Session, tracing
from atorch.smp.steps.averaging import Averaging, ShardedPasses
from atorch.smp.steps.micro_batch_run import MicroBatchRun, Owners
from atorch.smp.steps.slicing import StepArguments, StepStart, beginnings, no_step_begun

LOOKS = 3
"""Number of first steps whose batches are compared over the processes of a pipeline."""


@dataclass(eq=False, repr=False)
class Runner:
    """Runs steps on the parts of this process.

    Args:
        parts: the stages of this process, or the whole model.
        engine: the pipeline engine; None for a whole model.
        averaging: None for one replica, or if the parts average by themselves.
        passes: the passes of a model whose parameters are sharded over replicas.
        faults: the exceptions of the running step on this process.
        blank: the whole model without values.
        seed: equal on all processes.
    """

    model: DistributedModel
    owner: Session
    parts: tuple[nn.Module, ...]
    placed: PlacedSchedule
    engine: Engine | None
    ties: SharedParameters | None
    averaging: Averaging | None
    passes: ShardedPasses | None
    faults: list[Exception]
    blank: nn.Module
    seed: int

    def __post_init__(self) -> None:
        self.num_steps = 0
        self.ended_by: str | None = None
        """The reason why no more steps can run, if so."""
        self._trains: dict[Hashable, bool] = {}  # by kind: steps of one kind call the model alike
        self._num_passes = 0  # backward passes since gradients were averaged
        self.reduces = False  # True if this step averages gradients at its end

    @property
    def loss_scale(self) -> float:
        """The factor of losses before backward."""
        return 1.0 if self.owner.optimizer is None else float(self.owner.optimizer.loss_scale)

    def run(self, function: Callable[..., Any], start: StepStart, detach: bool) -> list[Any]:
        """Run a step; returns the function's result for each micro-batch, on every process of the pipeline.

        Raises:
            ArgumentError, StrategyError: any process raised; that process raises its original exception.
        """
        self.num_steps += 1
        self.faults.clear()
        work = _Work(self, function, start, detach)
        train = torch.is_grad_enabled()
        try:
            train = self._goes_back(work, start.is_alike)
        except Exception as error:  # the other replicas still average gradients
            self.faults.append(error)
        self._begin(train)
        try:
            if not self.faults:
                with self._apart(train):
                    work.run_all(train)
        except Exception as error:  # as above
            self.faults.append(error)
        self._average(train)
        if work.went_back:
            self._num_passes = (self._num_passes + 1) % self.model.options.backward_passes_per_step
        if work.went_back and self.owner.optimizer is not None:
            self.owner.optimizer.mark_synced()
        self._end_together()
        return work.returned if self.engine is None else self._from_last(work.returned)

    def join_remaining(self) -> None:
        """Take part without batches in the steps of replicas that have some left; then copy their parameters."""
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        while True:
            for parameter in parameters:
                parameter.grad = None
            if no_step_begun(self.owner):
                break
            self.faults.clear()
            self._average(False)
            self._end_together()
        data = self.owner.mesh.group("data", "zero")
        if data.size() > 1:
            (most,) = all_reduce_max([self.num_steps], data)
            root = first_not_none(True if self.num_steps == most else None, data)
            assert root is not None, "somebody has run most steps"
            broadcast([(dist.get_group_rank(data, root[0]), [tensor.detach() for tensor in parameters])], data)

    def seed_of(self, number: int) -> int | None:
        """The seed of random numbers before the model's call in a micro-batch, equal on all processes of a pipeline."""
        if self.engine is None:
            return None
        place = self.owner.mesh.rank("data", "zero")
        return zlib.crc32(repr((self.seed, self.num_steps, place, number)).encode())

    def _goes_back(self, work: _Work, is_alike: bool) -> bool:
        """True if a step of this kind runs backward; the first step of a kind is traced to find out."""
        if self.engine is None:
            return torch.is_grad_enabled()
        group = self.engine.group
        if not is_alike:
            raise ArgumentError(
                "processes of one pipeline were given batches of different sizes; they work on one batch together: "
                "shard the data by smp.dp_rank() and smp.dp_size(), not by smp.rank()"
            )
        if self.num_steps <= LOOKS:
            self._compare(work.pieces, group)
        if work.kind not in self._trains:
            with self.engine.working_on(work):
                pass
            self._trains[work.kind] = self._from_last(work.looked) and torch.is_grad_enabled()
        return self._trains[work.kind]

    def _compare(self, pieces: Sequence[StepArguments], group: dist.ProcessGroup) -> None:
        """Warn if processes of a pipeline have different batches: inputs and labels would not match."""
        high, low = all_reduce_max(hash_pair(beginnings(pieces)), group)
        if high != -low:
            logger.warning(
                "processes of one pipeline were given different batches: inputs are taken of the first one's, and what "
                "the loss reads of the last one's. Shard the data by smp.dp_rank() and smp.dp_size(), and shuffle alike"
            )

    def _begin(self, train: bool) -> None:
        model, averaging = self.model, self.averaging
        self.reduces = reduces = train and self._num_passes + 1 == model.options.backward_passes_per_step
        if averaging is None:
            return
        if train and model.options.broadcast_buffers and not model.joins:
            broadcast([(0, [buffer for part in self.parts for buffer in part.buffers()])], averaging.group)
        averaging.begin(reduces=reduces, overlaps=model.options.overlapping_allreduce and not model.joins)

    def _average(self, train: bool) -> None:
        averaging = self.averaging
        if averaging is None:
            return
        if self.model.joins:
            running = torch.tensor([float(averaging.is_reducing), 1.0 if train else 0.0])
            dist.all_reduce(running, group=averaging.group)
            averaging.divisor = averaging.group.size() if self.model.divides_by_all else int(running[1])
            if running[0] and not averaging.is_reducing:
                averaging.begin(reduces=True, overlaps=False)
        averaging.finish()

    @contextmanager
    def _apart(self, train: bool) -> Iterator[None]:
        """Sum only this step's gradients of tied parameters over the processes of the pipeline."""
        if self.ties is None or not train:
            yield
            return
        tied = self.ties.parameters
        before = [parameter.grad for parameter in tied]
        for parameter in tied:
            parameter.grad = None
        yield
        self.ties.add_up()
        for parameter, gradient in zip(tied, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _end_together(self) -> None:
        """Raise on all processes if one has failed in the step."""

        def raise_first() -> None:
            for fault in self.faults:
                raise fault

        if all_reduce_max([bool(self.faults)])[0]:
            all_or_none(raise_first)

    def _from_last(self, data: Any) -> Any:
        engine = self.engine
        assert engine is not None, "a pipeline"
        received = from_place(data, engine.last_place, engine.group, engine.device)
        return data if engine.group.rank() == engine.last_place else received


class _Work:
    """The micro-batches of a step, in the engine's interface."""

    def __init__(self, runner: Runner, function: Callable[..., Any], start: StepStart, detach: bool) -> None:
        self.kind, self.pieces, self.train = (function, start.kind), start.pieces, False
        self.returned: list[Any] = [None] * self.count
        self.looked = False
        """True if the function called `model.backward` in the trace."""
        self.went_back = False
        """True if gradients were computed."""
        self._runner, self._function, self._detach = runner, function, detach
        self._owners: Owners = {}
        options = runner.model.options
        self._scale = runner.loss_scale / (self.count if options.average_grads_across_microbatches else 1)

    @property
    def count(self) -> int:
        return len(self.pieces)

    @property
    def sizes(self) -> Hashable:
        """The key of activation shapes: equal kinds and batch sizes give equal shapes between stages."""
        return self.kind, sizes_of(self.pieces[0])

    def look(self, part: nn.Module) -> None:
        with tracing():
            self.looked = self._body(0, part).has_backward

    def run(self, number: int, part: nn.Module) -> Any:
        """Run the function on a micro-batch; returns the next stage's input, or the loss on the last stage."""
        stage, faults = stage_of(part), self._runner.faults
        if not faults:
            try:
                body = self._body(number, part)
                return self._concluded(body) if stage.is_last else body.wires
            except Exception as error:  # the other stages wait for this stage's output
                faults.append(error)
        return self._nothing(part)

    def run_all(self, train: bool) -> None:
        """Run all micro-batches, through a whole model or the stages of a pipeline."""
        self.train = train
        engine = self._runner.engine
        if engine is None:
            self._run_alone(self._runner.parts[0])
        else:
            engine.run(self, train=train)
            self.went_back = train

    def _run_alone(self, part: nn.Module) -> None:
        losses: dict[int, Tensor] = {}
        passes, faults = self._runner.passes, self._runner.faults
        reduction = passes or self._runner.averaging
        with nullcontext() if passes is None else passes.step():
            for is_backward, _, number in turns(self._runner.placed, self.count)[0]:
                if faults:
                    return
                if not is_backward:
                    losses[number] = self._concluded(self._body(number, part))
                elif losses[number].requires_grad:
                    last = number == self.count - 1 and (passes is None or self._runner.reduces)
                    with nullcontext() if reduction is None else reduction.backward(last=last):
                        self.went_back = True
                        losses.pop(number).backward()

    def _body(self, number: int, part: nn.Module) -> MicroBatchRun:
        body = MicroBatchRun(self._function, self.pieces[number], number, part, self._owners)
        with self._runner.model.serving(body):
            body.run(self._runner.seed_of(number))
        return body

    def _concluded(self, body: MicroBatchRun) -> Tensor:
        """The scaled loss of a micro-batch whose function has ended."""
        body.allow_backward()
        if body.has_backward and not torch.is_grad_enabled():
            raise ArgumentError("model.backward was called under torch.no_grad(); leave one of the two out")
        if self._runner.engine is not None and body.has_backward != self.train:
            raise StrategyError(
                f"the function of smp.step {'calls' if body.has_backward else 'does not call'} model.backward, and on "
                "its first batch it was otherwise; give it an argument by which the two kinds of steps differ, or "
                "make them two functions"
            )
        self.returned[body.number] = map_tensors(Tensor.detach, body.returned) if self._detach else body.returned
        total = torch.zeros((), device=self._runner.owner.device)
        for loss in body.losses:
            wide = torch.promote_types(loss.dtype, torch.float32)  # a large scale overflows fp16
            total = total + loss.to(wide) * self._scale
        return total

    def _nothing(self, part: nn.Module) -> Any:
        """A placeholder for a stage's result after a failure: zeros, with zero gradients."""
        stage, engine = stage_of(part), self._runner.engine
        assert engine is not None
        assert engine.job is not None
        assert stage.current is not None
        leaves = (*stage.current.values.values(), *part.parameters())
        anchor = torch.zeros((), device=engine.device)
        for leaf in leaves:
            if leaf.requires_grad:
                anchor = anchor + leaf.reshape(-1)[:1].sum() * 0.0
        if stage.is_last:
            return anchor
        outputs = []
        for value in stage.outgoing:
            empty = engine.job.shapes[value.call][value.number].zeros(engine.device).clone()
            outputs.append(empty + anchor.to(empty.dtype) if empty.is_floating_point() else empty)
        return tuple(outputs)
