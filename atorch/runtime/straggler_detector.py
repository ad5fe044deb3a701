"""Measures step times on each process by kind of work, and names who keeps the others waiting.

    detector = StragglerDetector(model, optim, every=50)
    for batch in loader: ...                    # the loop stays as it is

Of a step three parts are a process's own: from the last step to the model's call (its data, and what else the loop
does), forward, and backward from the first to the last gradient. Hooks note when they begin and end: on a GPU as events
in its stream, which nobody waits for until the report. The rest of the step, in which processes wait for one another,
says nothing about who is slow.
"""

from __future__ import annotations

import functools
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.distributed.collectives import agreed, everyone, gather_objects, meeting_place, nobody_else, several
from atorch.distributed.description import described
from atorch.errors import ArgumentError, shown
from atorch.logs import logger
from atorch.runtime.stragglers import PARTS, StepReport, Straggler, behind
from atorch.runtime.wrapper import Wrapper

DATA, FORWARD, BACKWARD = PARTS
WHOLE, PAUSE, HELD = "whole", "pause", "held"  # a step; an evaluation in it; waiting in forward
IN_A_PASS = ("tensor", "sequence", "context")  # axes along which processes wait for one another in every pass


class Clock(Protocol):
    """A clock in the order of the work that it is about."""

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class HostClock:
    """A clock of work that is done when its call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class StreamClock:
    """A clock of work on a CUDA device, in the current stream. Reading it waits for the device."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class StragglerDetector:
    """Measures the steps of `optim`, and reports every so many of them, on rank 0, who was slow at what.

    All processes make one together. It is over with `close()`, or with the block where it is a context manager.

    Args:
        model, optim: as `auto_accelerate` returned them, or any module (also a DistributedDataParallel) and optimizer.
        every: steps between reports, at least 2. The first of them is not measured: the order of gradients is learnt.
        patience: reports in a row that name a process before there is a warning.
        margin: how far above the median of its peers a process is slow, as a share of the median step.
        on_report: called with each `StepReport` on rank 0.
        clock: what times are taken by; None for the device's own.

    Raises:
        ArgumentError: on all processes, where an argument does not hold or differs between them.
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
        clock: Clock | None = None,
    ) -> None:
        given = {"every": every, "patience": patience, "margin": margin}
        agreed(
            "StragglerDetector",
            lambda: {name: described(name, value) for name, value in given.items()},
            lambda: _check(model, optim, every, patience, margin),
        )
        self.report: StepReport | None = None
        """The last one, on rank 0."""
        self._every, self._patience, self._margin, self._on_report = every, patience, margin, on_report
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._clock = clock or (StreamClock() if device.type == "cuda" else HostClock())
        self._hosts: list[str] = gather_objects(socket.gethostname())
        self._slow: dict[tuple[str, tuple[int, ...]], int] = {}  # reports in a row, by part and ranks
        self._num_steps, self._measured = 0, 0
        self._spans: list[tuple[str, Any, Any]] = []  # since the last report: what, from when, until when
        self._last_step: Any = None  # when it ended
        self._since: Any = None  # since when the loop is in neither model nor backward nor step
        self._entered: Any = None  # when the model's own forward was
        self._held: Any = None  # since when that waits for parameters of other processes
        self._first: Any = None  # when the first gradient came
        self._order: list[torch.Tensor] = []  # of the gradients, in the first pass of the step that learns it
        self._learning: list[Any] = []  # hooks that do
        self._passes: list[Any] = []  # hooks on the first and the last gradient
        self._place(model)
        self._handles = [*self._watch(model), optim.register_step_post_hook(lambda *_: self._step())]
        self._learn()

    def __enter__(self) -> StragglerDetector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Measure no more. All processes do so between the same two steps."""
        for handle in chain(self._handles, self._learning, self._passes):
            handle.remove()

    def _place(self, model: nn.Module) -> None:
        """Say which processes do the same work, and which wait for one another in the midst of it."""
        mesh = getattr(getattr(model, "_atorch", None), "mesh", None)
        roots, rank = list(_roots(model)), dist.get_rank() if several() else 0
        self._peers, self._is_staged, within = 0, False, [rank]
        if mesh is not None and mesh.num_ranks > 1:
            self._peers, self._is_staged = mesh.rank("pipeline"), mesh.size("pipeline") > 1
            compiled = any(_gathers(each) and _is_compiled(each) for root in roots for each in root.modules())
            within = mesh.ranks(*IN_A_PASS, *(("data", "zero") if compiled else ()))
        # Gradients of replicas travel while others are computed, and are waited for at the end of backward.
        is_own = not several() or isinstance(model, DistributedDataParallel) or hasattr(model, "replicas")
        self._units = (min(within), min(within) if is_own else -1)
        self._parameters = [each for each in model.parameters() if each.requires_grad] if is_own else []

    def _watch(self, model: nn.Module) -> Iterator[Any]:
        """Hooks around all that a call of the model is, around its own modules, and where these wait for parameters."""
        yield model.register_forward_pre_hook(_Hook(self._call), prepend=True)
        yield model.register_forward_hook(_Hook(self._return))
        for root in _roots(model):
            if _is_compiled(root):  # its hooks would be, too
                continue
            yield root.register_forward_pre_hook(_Hook(self._enter))
            yield root.register_forward_hook(_Hook(self._leave))
            for module in root.modules():
                if module is not root and _gathers(module) and not _is_compiled(module):
                    yield module.register_forward_pre_hook(_Hook(self._hold), prepend=True)
                    yield module.register_forward_pre_hook(_Hook(self._go_on))

    def _call(self, *_: Any) -> None:
        if self._since is not None and torch.is_grad_enabled():
            self._spans.append((DATA, self._since, self._clock.now()))
            self._since = None

    def _return(self, *_: Any) -> None:
        if self._since is not None and not torch.is_grad_enabled():
            now = self._clock.now()
            self._spans.append((PAUSE, self._since, now))  # with what came before it
            self._since = now

    def _enter(self, *_: Any) -> None:
        self._entered = self._clock.now() if torch.is_grad_enabled() else None

    def _leave(self, *_: Any) -> None:
        if self._entered is not None:
            self._spans.append((FORWARD, self._entered, self._clock.now()))
            self._entered = None

    def _hold(self, *_: Any) -> None:
        self._held = None if self._entered is None else self._clock.now()

    def _go_on(self, *_: Any) -> None:
        if self._held is not None:
            self._spans.append((HELD, self._held, self._clock.now()))
            self._held = None

    def _arrive(self, parameter: torch.Tensor) -> None:
        self._order.append(parameter)

    def _begin_backward(self, *_: Any) -> None:
        self._first = self._clock.now()

    def _end_backward(self, *_: Any) -> None:
        if self._first is not None:
            now = self._clock.now()
            self._spans.append((BACKWARD, self._first, now))
            self._first = None
            self._since = None if self._is_staged else now  # between their passes stages wait for one another

    def _step(self) -> None:
        """After each step of the optimizer."""
        self._num_steps += 1
        now, place = self._clock.now(), self._num_steps % self._every
        if place == 1:
            self._has_learnt()
        else:
            self._spans.append((WHOLE, self._last_step, now))
            self._measured += 1
        if place == 0:
            self._tell()
            self._learn()
            now = None
        self._last_step = self._since = now
        self._entered = self._held = self._first = None

    def _learn(self) -> None:
        """In the next step note which gradient is first and which last: hooks on all would cost in every step."""
        _remove(self._passes)
        for parameter in self._parameters:
            self._learning.append(parameter.register_post_accumulate_grad_hook(_Hook(self._arrive)))

    def _has_learnt(self) -> None:
        _remove(self._learning)
        self._spans.clear()
        if self._order:
            again = next((place for place, each in enumerate(self._order) if place and each is self._order[0]), None)
            ends = self._order[0], self._order[:again][-1]
            for parameter, method in zip(ends, (self._begin_backward, self._end_backward), strict=True):
                self._passes.append(parameter.register_post_accumulate_grad_hook(_Hook(method)))
        self._order.clear()

    def _tell(self) -> None:
        """Bring together what all processes have measured: a few numbers of each, on rank 0."""
        taken = dict.fromkeys((WHOLE, *PARTS, PAUSE, HELD), 0.0)
        for what, start, end in self._spans:
            taken[what] += self._clock.seconds(start, end)
        taken = {what: seconds / self._measured for what, seconds in taken.items()}
        self._spans.clear()
        self._measured = 0
        taken[WHOLE] -= taken[PAUSE]
        taken[FORWARD] = max(0.0, taken[FORWARD] - taken[HELD])
        own = [taken[WHOLE], *(taken[part] for part in PARTS), self._peers, *self._units]
        rows = _gathered(own)
        if rows is None:
            return
        whole, *parts, peers, forward, backward = ([row[place] for row in rows] for place in range(len(own)))
        units = {DATA: list(range(len(rows))), FORWARD: [*map(int, forward)], BACKWARD: [*map(int, backward)]}
        slow, before = [], self._slow
        self._slow = {}
        for part, by_rank in zip(PARTS, parts, strict=True):
            found = behind(by_rank, whole, self._margin, units[part], [*map(int, peers)])
            for ranks, (own_s, median_s) in found.items():
                reports = self._slow[part, ranks] = before.get((part, ranks), 0) + 1
                hosts = tuple(self._hosts[rank] for rank in ranks)
                slow.append(Straggler(ranks, hosts, part, own_s, median_s, reports))
        self.report = StepReport(self._num_steps, whole, dict(zip(PARTS, parts, strict=True)), slow)
        logger.info("%s", self.report)
        for each in slow:
            if each.reports == self._patience:
                logger.warning("%s, in the last %d reports; the others wait for it", each, each.reports)
        if self._on_report is not None:
            self._on_report(self.report)


class _Hook:
    """A method as a hook that keeps nothing alive, and that copies and pickles of its module do not have."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_nothing,)


def _nothing(*_: Any) -> None:
    """The hook of a copy."""


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _roots(model: nn.Module) -> Iterator[nn.Module]:
    """The user's modules below what is wrapped around them: one, or one for each stage of a pipeline here."""
    if isinstance(model, (Wrapper, DistributedDataParallel)):
        for inner in (model.module, *getattr(model, "others", ())):
            yield from _roots(inner)
    else:
        yield model


def _gathers(module: nn.Module) -> bool:
    """True if a module's forward begins with waiting for its parameters."""
    return hasattr(module, "unshard") and hasattr(module, "reshard")  # FSDP2's, which is not imported for this


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _gathered(own: list[float]) -> list[list[float]] | None:
    """Every rank's numbers, on rank 0; None on the others."""
    if not several():
        return [own]
    rank, size = dist.get_rank(), dist.get_world_size()
    if nobody_else():
        return [own] * size if rank == 0 else None
    held = torch.tensor(own, dtype=torch.float64, device=meeting_place())
    rows = [torch.empty_like(held) for _ in range(size)] if rank == 0 else None
    dist.gather(held, rows, group=everyone(), group_dst=0)
    return None if rows is None else [row.tolist() for row in rows]


def _check(model: Any, optim: Any, every: Any, patience: Any, margin: Any) -> None:
    if not isinstance(model, nn.Module):
        meant = "result.model, result.optim" if hasattr(model, "optim") else "the module that the loop calls"
        raise ArgumentError(f"StragglerDetector was given a {type(model).__name__} as model; give {meant}")
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
