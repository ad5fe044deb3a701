"""Measures step times on each process by kind of work, and names the processes that the others wait for.

    detector = StragglerDetector(model, optim, every=50)
    for batch in loader: ...                    # the loop stays as it is

Processes that train together take equally long for every step, since all wait for the slowest. So the detector compares
each process's own work: data (from the last step to the model's call), forward, and backward up to the last gradient.
On a GPU the times are events in its stream, which the host reads only for the report.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.distributed.collectives import call_on_all_ranks, gather_objects, is_distributed
from atorch.distributed.fingerprints import described
from atorch.errors import ArgumentError, shown
from atorch.logs import logger
from atorch.model.pytree import tensors_in
from atorch.model.wrapper import Wrapper
from atorch.units import format_seconds

PARTS = DATA, FORWARD, BACKWARD = ("data", "forward", "backward")
WHOLE, HELD = "whole", "held"  # the step; waits for parameters in forward
IN_A_PASS = ("tensor", "sequence", "context")  # axes along which processes wait for one another in every pass
SPREAD = 6.0  # median deviations from the median: four standard deviations of normally distributed times
NAMED = 8  # most ranks that a message names


class WorkTimer:
    """A clock for work. On CUDA it records events in the current stream, and only `seconds` waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"

    def now(self) -> Any:
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        if not self._on_stream:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


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
        ranks = ", ".join(map(str, self.ranks[:NAMED])) + (", …" if len(self.ranks) > NAMED else "")
        hosts = ", ".join(list(dict.fromkeys(self.hosts))[:NAMED])
        is_several = len(self.ranks) > 1
        who = f"one of ranks {ranks}, which wait for one another in it," if is_several else f"rank {ranks}"
        own, median = format_seconds(self.own_s), format_seconds(self.median_s)
        return f"{who} on {hosts} takes {own} a step for {self.part}, where the median is {median}"


@dataclass(frozen=True)
class StepReport:
    """Seconds a step since the last report, by rank."""

    step: int  # optimizer steps since measuring began
    steps_s: Sequence[float]  # whole steps
    parts_s: Mapping[str, Sequence[float]]  # by PARTS; 0 where a part is not measured
    stragglers: Sequence[Straggler] = ()

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {' / '.join(map(format_seconds, (min(seconds), median_low(seconds), max(seconds))))}"
            for name, seconds in {WHOLE: self.steps_s, **self.parts_s}.items()
        )
        return f"step {self.step}: least / median / most of {len(self.steps_s)} processes: {times}"


class StragglerDetector:
    """Measures the steps of `optim`, and reports on rank 0, every `every` steps, which ranks were slow at which part.

    All processes construct it together. It ends with `close()`, or with the block where it is a context manager. It
    does not measure the first step, nor steps with a pass without gradients.

    Args:
        model, optim: as `auto_accelerate` returned them, or any module (also a DistributedDataParallel) and optimizer.
        every: steps between reports, at least 2.
        patience: consecutive reports that name a process before a warning.
        margin: excess over the median of its peers that makes a process slow, as a share of the median step.
        on_report: called with each `StepReport` on rank 0.
        clock: measures the times; None for the device's own.

    Raises:
        ArgumentError: on all processes, if an argument is invalid or differs between them.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        *,
        every: int = 50,
        patience: int = 3,
        margin: float = 0.1,
        on_report: Callable[[StepReport], None] | None = None,
        clock: WorkTimer | None = None,
    ) -> None:
        settings = {"every": every, "patience": patience, "margin": margin}
        call_on_all_ranks(
            "StragglerDetector",
            lambda: {name: described(name, value) for name, value in settings.items()},
            lambda: _check(model, optim, every, patience, margin),
        )
        self.report: StepReport | None = None
        """The last report, on rank 0."""
        self._every, self._patience, self._margin, self._on_report = every, patience, margin, on_report
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._clock = clock or WorkTimer(device)
        self._slow: dict[tuple[str, tuple[int, ...]], int] = {}  # consecutive reports, by part and ranks
        self._num_steps = 0
        self._steps: list[list[tuple[str, Any, Any]]] = []  # (part, start, end) in the steps since the last report
        self._step: list[tuple[str, Any, Any]] = []  # the same in this step
        self._since: dict[str, Any] = {}  # starts of the parts under way
        self._place(model)
        self._handles = [*self._watch(model), optim.register_step_post_hook(lambda *_: self._end_step())]

    def __enter__(self) -> StragglerDetector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop measuring. All processes must call it between the same two steps."""
        for handle in self._handles:
            handle.remove()

    def _place(self, model: nn.Module) -> None:
        """Collect which processes do the same work, and which wait for one another within it."""
        mesh = getattr(getattr(model, "_atorch", None), "mesh", None)
        peers, self._is_staged, waiting = 0, False, [dist.get_rank() if is_distributed() else 0]
        if mesh is not None and mesh.num_ranks > 1:
            peers, self._is_staged = mesh.rank("pipeline"), mesh.size("pipeline") > 1
            compiled = any(_gathers(module) and _is_compiled(module) for module in model.modules())
            waiting = mesh.ranks(*IN_A_PASS, *(("data", "zero") if compiled else ()))
        # Replicas reduce gradients while backward computes others, and wait for them only at its end.
        self._is_own = not is_distributed() or isinstance(model, DistributedDataParallel) or hasattr(model, "replicas")
        self._hosts, self._peers, self._units = zip(
            *gather_objects((socket.gethostname(), peers, min(waiting))), strict=True
        )

    def _watch(self, model: nn.Module) -> Iterator[Any]:
        """Hook the model's call, its root modules, and the places where modules wait for parameters."""
        yield model.register_forward_pre_hook(_Hook(self._call), prepend=True)
        for root in _roots(model):
            if _is_compiled(root):  # its hooks would be compiled, too
                continue
            yield root.register_forward_pre_hook(_Hook(self._begin, FORWARD))
            yield root.register_forward_hook(_Hook(self._leave))
            for module in root.modules():
                if module is not root and _gathers(module) and not _is_compiled(module):
                    yield module.register_forward_pre_hook(_Hook(self._begin, HELD), prepend=True)
                    yield module.register_forward_pre_hook(_Hook(self._end, HELD))

    def _begin(self, what: str, *_: Any) -> None:
        self._since[what] = self._clock.now() if torch.is_grad_enabled() else None

    def _end(self, what: str, *_: Any) -> None:
        if (start := self._since.pop(what, None)) is not None:
            self._step.append((what, start, self._clock.now()))

    def _call(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._end(DATA)
        else:
            self._since.clear()  # the step is not measured

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        self._end(FORWARD)
        if self._is_own and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if BACKWARD not in self._since:
            self._since[BACKWARD] = self._clock.now()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._end(BACKWARD)
        if not self._is_staged:  # pipeline stages wait for one another between their passes
            self._since[DATA] = self._clock.now()

    def _end_step(self) -> None:
        self._num_steps += 1
        if WHOLE in self._since:
            self._end(WHOLE)
            self._steps.append(self._step)
        if self._num_steps % self._every == 0:
            self._tell()
        self._step = []
        self._since = dict.fromkeys((WHOLE, DATA), self._clock.now())

    def _tell(self) -> None:
        """Gather the measured times of all processes, a few numbers of each, and report them on rank 0."""
        totals = dict.fromkeys((WHOLE, *PARTS, HELD), 0.0)
        for what, start, end in chain.from_iterable(self._steps):
            totals[what] += self._clock.seconds(start, end)
        totals[FORWARD] = max(0.0, totals[FORWARD] - totals.pop(HELD))
        num_measured = max(1, len(self._steps))
        rows = gather_objects({what: seconds / num_measured for what, seconds in totals.items()})
        self._steps = []
        if is_distributed() and dist.get_rank():
            return
        whole, *parts = ([row[what] for row in rows] for what in totals)
        slow, before, self._slow = [], self._slow, {}
        for part, by_rank in zip(PARTS, parts, strict=True):
            units = range(len(rows)) if part == DATA else self._units
            slow_ranks = behind(by_rank, whole, self._margin, units, self._peers)
            for ranks, (own_s, median_s) in slow_ranks.items():
                reports = self._slow[part, ranks] = before.get((part, ranks), 0) + 1
                hosts = tuple(self._hosts[rank] for rank in ranks)
                slow.append(Straggler(ranks, hosts, part, own_s, median_s, reports))
        self.report = StepReport(self._num_steps, whole, dict(zip(PARTS, parts, strict=True)), slow)
        logger.info("%s", self.report)
        for straggler in slow:
            if straggler.reports == self._patience:
                logger.warning("%s, in the last %d reports; the others wait for it", straggler, straggler.reports)
        if self._on_report is not None:
            self._on_report(self.report)


class _Hook(partial[None]):
    """A hook that copies and pickles of its module replace by a no-op."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_no_op,)


def _no_op(*_: Any) -> None: ...


def behind(
    own_s: Sequence[float], whole_s: Sequence[float], margin: float, units: Sequence[int], peers: Sequence[int]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """The ranks that are slow in a part of the step, with their seconds and the median of their peers.

    The excess of a slow unit over the (lower) median is more than `margin` of the median step. It is also more than
    SPREAD median deviations from the median. Of ranks that wait for one another, the fastest hardly waited. So its time
    counts for all of them, and they are named together.

    Args:
        own_s, whole_s: seconds of the part and of the whole step, by rank.
        units: by rank, a number shared by ranks that wait for one another in this part.
        peers: by rank, a number shared by ranks that do the same work.
    """
    least, slow = margin * median_low(whole_s), {}
    for kind in sorted(set(peers)):
        members: dict[int, list[int]] = {}
        for rank, unit in enumerate(units):
            if peers[rank] == kind:
                members.setdefault(unit, []).append(rank)
        times = {unit: min(own_s[rank] for rank in ranks) for unit, ranks in members.items()}
        median = median_low(times.values())
        spread = median_low(abs(seconds - median) for seconds in times.values())
        for unit, time_s in times.items():
            if time_s - median > max(least, SPREAD * spread):
                slow[tuple(members[unit])] = (time_s, median)
    return slow


def _roots(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, (Wrapper, DistributedDataParallel)):
        for inner in (model.module, *getattr(model, "others", ())):
            yield from _roots(inner)
    else:
        yield model


def _gathers(module: nn.Module) -> bool:
    return hasattr(module, "unshard") and hasattr(module, "reshard")  # FSDP2's methods, without importing it


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _check(model: Any, optim: Any, every: Any, patience: Any, margin: Any) -> None:
    if not isinstance(model, nn.Module):
        expected = "result.model, result.optim" if hasattr(model, "optim") else "the module that the loop calls"
        raise ArgumentError(f"StragglerDetector was given a {type(model).__name__} as model; give {expected}")
    if not hasattr(optim, "_optimizer_step_post_hooks"):
        raise ArgumentError(
            f"StragglerDetector was given a {type(optim).__name__} as optim, whose steps cannot be watched; give the "
            "torch.optim.Optimizer that the loop steps"
        )
    for name, number, least in (("every", every, 2), ("patience", patience, 1)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ArgumentError(
                f"StragglerDetector was given {name} {shown(number)}; it is a whole number of at least {least}"
            )
    if not isinstance(margin, (int, float)) or isinstance(margin, bool) or not 0 < margin < float("inf"):
        raise ArgumentError(f"StragglerDetector was given margin {shown(margin)}; it is a share of a step, such as 0.1")
