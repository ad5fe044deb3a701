"""Measures step times on each process by kind of work, and names the processes that the others wait for.

    detector = StragglerDetector(model, optim, every=50)
    for batch in loader: ...                    # the loop stays as it is

Processes that train together take equally long for every step, since all wait for the slowest. So the detector compares
each process's own work by three timers. They are data (from the last step to the model's call), forward, and backward
up to the last gradient. On a GPU they are events in its stream, which only a report reads.
"""

from __future__ import annotations

import math
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from statistics import median_low
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.distributed.barrier_diagnostics import listed
from atorch.distributed.collectives import gather_objects, is_distributed, require_equal
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.pytree import tensors_in
from atorch.model.wrapper import Wrapper
from atorch.units import format_seconds

PARTS = DATA, FORWARD, BACKWARD = ("data", "forward", "backward")
IN_A_PASS = ("tensor", "sequence", "context")  # axes along which processes wait for one another in every pass
SPREAD = 6.0  # median deviations from the median: four standard deviations of normally distributed times


@dataclass(frozen=True)
class Straggler:
    """The slow unit in a part of the step: one process, or several that wait for one another in this part."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    part: str  # one of PARTS
    own_s: float  # its seconds a step for the part
    median_s: float  # the median of its peers
    reports: int  # consecutive reports in which it was slow

    def __str__(self) -> str:
        is_one, ranks, hosts = len(self.ranks) == 1, listed(self.ranks), listed(list(dict.fromkeys(self.hosts)))
        who = f"rank {ranks}" if is_one else f"one of ranks {ranks}, which wait for one another in it,"
        seconds, median = format_seconds(self.own_s), format_seconds(self.median_s)
        return f"{who} on {hosts} takes {seconds} a step for {self.part}, where the median is {median}"


@dataclass(frozen=True)
class StepReport:
    """Seconds per step since the last report, by rank."""

    step: int  # optimizer steps since measuring began
    steps_s: Sequence[float]  # whole steps
    parts_s: Mapping[str, Sequence[float]]  # by PARTS; 0 where a part is not measured
    stragglers: Sequence[Straggler] = ()

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {' / '.join(map(format_seconds, (min(seconds), median_low(seconds), max(seconds))))}"
            for name, seconds in {"whole": self.steps_s, **self.parts_s}.items()
        )
        return f"step {self.step}: least / median / most of {len(self.steps_s)} processes: {times}"


class StragglerDetector(ExitStack):
    """Measures the steps of `optim`, and reports on rank 0, every `every` steps, which ranks were slow at which part.

    All processes construct it together. It ends with its block where it is a context manager, else with `close()`,
    which all processes call between the same two steps. It does not measure the first step.

    Args:
        model, optim: as `auto_accelerate` returned them, or any module (also a DistributedDataParallel) and optimizer.
        every: steps between reports, at least 2.
        patience: consecutive reports that name a process before a warning.
        margin: excess over the median of its peers that makes a process slow, as a share of the median step.
        on_report: called with each `StepReport` on rank 0.

    Raises:
        ArgumentError: on all processes, if an argument is invalid, or a number differs between them.
    """

    def __init__(
        self, model: nn.Module, optim: torch.optim.Optimizer, *, every: int = 50, patience: int = 3,
        margin: float = 0.1, on_report: Callable[[StepReport], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        arguments, call = f"every={every!r}, patience={patience!r}, margin={margin!r}", "StragglerDetector"
        require_equal(arguments, f"the call of {call}", ArgumentError)
        if not (isinstance(model, nn.Module) and hasattr(optim, "register_step_post_hook")):
            raise ArgumentError(
                f"{call} was given a {type(model).__name__} and a {type(optim).__name__}; give the module that the "
                "loop calls and the optimizer that it steps, such as result.model and result.optim"
            )
        if not (isinstance(every, int) and every >= 2 and patience >= 1 and 0 < margin < math.inf):
            raise ArgumentError(
                f"{call} was given {arguments}; every is a whole number of at least 2, patience is at least 1, and "
                "margin is a share of a step, such as 0.1"
            )
        self.report: StepReport | None = None
        """The last report, on rank 0."""
        self._every, self._patience, self._margin, self._on_report = every, patience, margin, on_report
        self._slow: dict[tuple[str, tuple[int, ...]], int] = {}  # consecutive reports, by part and ranks
        self._is_cuda = any(parameter.is_cuda for parameter in model.parameters())
        self._spans: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)  # beginning and end, by part
        self._open: tuple[str, Any] = ("", None)  # the part that runs, and the time at which it began
        self._num_steps, self._began = 0, None
        mesh = getattr(getattr(model, "_atorch", None), "mesh", None)
        rank = dist.get_rank() if is_distributed() else 0
        self._stage: int = 0 if mesh is None else mesh.rank("pipeline")
        self._unit: int = rank if mesh is None else min(mesh.ranks(*IN_A_PASS))
        self._is_staged = mesh is not None and mesh.size("pipeline") > 1
        for handle in (*self._watch(model), optim.register_step_post_hook(self._end_step)):
            self.callback(handle.remove)

    def _watch(self, model: nn.Module) -> Iterator[Any]:
        """Hook the model's call, its root modules, and the places where modules wait for parameters."""
        # Replicas reduce gradients while backward computes others, and wait for them only at its end.
        is_own = not is_distributed() or isinstance(model, DistributedDataParallel) or hasattr(model, "replicas")
        yield model.register_forward_pre_hook(_Hook(self._mark, DATA, False), prepend=True)
        for root in _roots(model):
            # FSDP2's method, without importing it
            gathering = [inner for inner in root.modules() if inner is not root and hasattr(inner, "unshard")]
            if any(getattr(module, "_compiled_call_impl", None) for module in (root, *gathering)):
                continue  # hooks would be compiled, too, and waits would count as work
            yield root.register_forward_pre_hook(_Hook(self._mark, FORWARD, True))
            yield root.register_forward_hook(_Hook(self._leave, is_own))
            for module in gathering:
                yield module.register_forward_pre_hook(_Hook(self._mark, FORWARD, False), prepend=True)
                yield module.register_forward_pre_hook(_Hook(self._mark, FORWARD, True))

    def _mark(self, part: str, begins: bool, *_: Any) -> None:
        """Begin a part; or end it, if it was the last that began."""
        if part == FORWARD and torch._C._current_graph_task_id() != -1:
            return  # a recompute, during backward
        now: Any = torch.cuda.Event(enable_timing=True) if self._is_cuda else perf_counter()
        if self._is_cuda:
            now.record()
        if not begins and self._open[0] == part:
            self._spans[part].append((self._open[1], now))
        self._open = (part if begins else "", now)

    def _leave(self, is_own: bool, root: nn.Module, args: Any, output: Any) -> None:
        self._mark(FORWARD, False)
        for tensor in tensors_in(output):
            if is_own and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if self._open[0] != BACKWARD:
            self._mark(BACKWARD, True)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._mark(BACKWARD, False)
        if not self._is_staged:  # pipeline stages wait for one another between their passes
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(partial(queue, partial(self._mark, DATA, True)))  # after others' callbacks, where replicas wait

    def _end_step(self, *_: Any) -> None:
        self._num_steps += 1
        self._mark(DATA, True)
        if self._num_steps % self._every == 0:
            self._send_report()
            self._mark(DATA, True)
        elif self._num_steps > 1:
            return
        self._began = self._open[1]
        self._spans.clear()

    def _send_report(self) -> None:
        """Gather the measured times of all processes, a few numbers of each, and report them on rank 0."""
        num_measured = self._every - (self._num_steps == self._every)
        timers = [[(self._began, self._open[1])], *(self._spans[part] for part in PARTS)]
        mean = [sum(starmap(_seconds, spans)) / num_measured for spans in timers]
        rows = gather_objects((socket.gethostname(), self._stage, self._unit, *mean))
        if is_distributed() and dist.get_rank():
            return
        hosts, stages, units, steps_s, *by_part = zip(*rows, strict=True)
        slow, before, self._slow, parts_s = [], self._slow, {}, dict(zip(PARTS, by_part, strict=True))
        for part, own_s in parts_s.items():
            of_part = range(len(rows)) if part == DATA else units
            for ranks, (unit_s, median_s) in behind(own_s, steps_s, self._margin, of_part, stages).items():
                reports = self._slow[part, ranks] = before.get((part, ranks), 0) + 1
                slow.append(Straggler(ranks, tuple(hosts[i] for i in ranks), part, unit_s, median_s, reports))
                if reports == self._patience:
                    logger.warning("%s, in the last %d reports; the others wait for it", slow[-1], reports)
        self.report = StepReport(self._num_steps, steps_s, parts_s, slow)
        logger.info("%s", self.report)
        if self._on_report is not None:
            self._on_report(self.report)


class _Hook(partial[None]):
    """A hook that copies and pickles of its module replace by a no-op."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_no_op,)


def _no_op(*_: Any) -> None: ...


def _seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - float(start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def behind(
    own_s: Sequence[float], whole_s: Sequence[float], margin: float, units: Sequence[int], peers: Sequence[int]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """The ranks that are slow in a part of the step, with their seconds and the median of their peers.

    A unit of ranks with one number in `units` wait for one another, so its fastest one hardly waited, and its time
    counts for all. A unit is compared with the (lower) median of those with its number in `peers`. It is slow if its
    excess is more than `margin` of the median step, and more than SPREAD median deviations.
    """
    least, slow = margin * median_low(whole_s), {}
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, unit in enumerate(zip(peers, units, strict=True)):
        members[unit].append(rank)
    for kind in sorted(set(peers)):
        times = {tuple(ranks): min(own_s[n] for n in ranks) for unit, ranks in members.items() if unit[0] == kind}
        median = median_low(times.values())
        spread = median_low(abs(time_s - median) for time_s in times.values())
        for ranks, time_s in times.items():
            if time_s - median > max(least, SPREAD * spread):
                slow[ranks] = (time_s, median)
    return slow


def _roots(model: nn.Module) -> list[nn.Module]:
    if not isinstance(model, (Wrapper, DistributedDataParallel)):
        return [model]
    return [root for inner in (model.module, *getattr(model, "others", ())) for root in _roots(inner)]
