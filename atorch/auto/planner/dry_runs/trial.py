"""A trial: a strategy applied to a copy of the model and stepped on all ranks together, with failures on any rank.

Every phase is guarded (`fault_barrier`): a candidate that fails on one rank is rejected on all. Nothing is interrupted;
the time limit is checked between phases.

A trial has a copy of the user's context with memory of its own, and real batches. A candidate may change modules and
tensors in place; the user's model, random states and samplers keep their state.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from atorch.auto.context import AccelerateResult, Context
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, FaultBarrier
from atorch.auto.strategy import Strategy
from atorch.auto.verification import cannot_evaluate, check
from atorch.distributed.mesh import BATCH_AXES
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, StrategyError
from atorch.model.copy import copy_with, typical_values
from atorch.model.copy_isolation import OwnMemory, make_writable, released
from atorch.model.deferred_init import HeldValues, refuse_meta_attributes
from atorch.model.meta_device import has_meta
from atorch.model.other_modules import OtherModules
from atorch.model.pytree import local_part
from atorch.model.reachability import modules_reached
from atorch.profiler.memory_tracker import PeakMemory

NUM_BATCHES = 8


def candidate(ctx: Context, *, in_parts: bool = False) -> Context:
    """`ctx` on a copy of its model. Batches come from a BatchCache, so that building it involves no other process.

    Tensors on the training device are copied at once: multi-tensor kernels of optimizers write through raw pointers,
    which a lazy clone does not notice. Tensors elsewhere are moved there, which copies them. Those on the meta device
    stay there and get their initial values part by part during `build`; without initial values they get typical ones.

    in_parts: the copy is made on the meta device, and `build` copies this process's part of each value alone.
    """
    copied = OwnMemory(lambda device: device.type != ctx.device.type)
    values = HeldValues(ctx.root) if in_parts and not has_meta([ctx.root]) else None

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        tensor = local_part(tensor)
        if tensor.is_meta:
            return torch.empty_like(tensor) if ctx.initial is not None else typical_values(tensor, ctx.device)
        on_meta = None if values is None else values.on_meta(tensor)
        return copied(tensor) if on_meta is None else on_meta

    made = _on_copy(ctx, convert)
    if values is not None:
        try:
            refuse_meta_attributes(made.root)
        except ArgumentError:  # it also holds a parameter in another place, which `build` would not fill
            return candidate(ctx)
        made = replace(made, initial=values)
    make_writable([*made.root.parameters(), *made.root.buffers()])
    return replace(made, mesh=None, make_loader=None, rescalers=[])


@contextmanager
def parked_on_host(ctx: Context) -> Iterator[Context]:
    """`ctx` on a copy of its model in host memory; inside, the model itself frees its accelerator memory."""
    tensors = [*ctx.root.parameters(), *ctx.root.buffers()]
    tensors = [tensor for tensor in tensors if local_part(tensor).device.type != "cpu" and not tensor.is_meta]
    if not tensors:
        yield ctx
        return
    with released([local_part(tensor) for tensor in tensors]) as values:
        yield _on_copy(ctx, OwnMemory(lambda device: True, values))


def _on_copy(ctx: Context, convert: Callable[[torch.Tensor], torch.Tensor]) -> Context:
    functions = ctx.call_model, ctx.loss_func, ctx.prepare_input  # their references to the model must become the copy
    duplicate: nn.Module
    duplicate, (call_model, loss_func, prepare_input) = copy_with(ctx.root, functions, convert)
    ctx = replace(ctx, call_model=call_model, loss_func=loss_func, prepare_input=prepare_input)
    others = OtherModules(modules_reached((loss_func, prepare_input), duplicate), ctx.other_modules)
    return replace(ctx, root=duplicate, parts=(duplicate,), other_modules=others)


@dataclass
class BatchCache:
    """The first batches of the user's own loader, read once for each rank and number of ranks."""

    ctx: Context
    num_batches: int = NUM_BATCHES
    epoch: int | None = None  # batches of an epoch, once some were read, if the loader has a length
    _batches: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    def batches(self, rank: int, size: int) -> list[Any]:
        """The first batches of rank `rank` of `size` ranks that see different samples.

        Raises:
            ArgumentError: the loader has no batch.
        """
        if (rank, size) in self._batches:
            return self._batches[rank, size]
        if self.ctx.make_loader is None:
            raise ArgumentError("a dry run needs data; give a dataset")
        loader = self.ctx.make_loader(rank, size)
        self.epoch = len(loader) if hasattr(loader, "__len__") else None
        with preserved_rng(), _preserved_position(loader):  # loaders draw a seed
            batches = list(itertools.islice(loader, self.num_batches))
        if not batches:
            raise ArgumentError("the dataset has no full batch, so nothing can be dry-run; use a smaller batch_size")
        self._batches[rank, size] = batches
        return batches


@contextmanager
def _preserved_position(loader: Any) -> Iterator[None]:
    """Restore the positions of samplers, datasets and generators afterwards."""
    parts = list(_parts(loader))
    found = [getattr(part, "generator", None) for part in parts]
    generators = {id(g): (g, g.get_state()) for g in found if isinstance(g, torch.Generator)}
    stateful = [part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")]
    states = [part.state_dict() for part in stateful]
    try:
        yield
    finally:
        for generator, state in generators.values():
            generator.set_state(state)
        for part, state in zip(stateful, states, strict=True):
            part.load_state_dict(state)


def _parts(loader: Any) -> Iterator[Any]:
    """The loader and its datasets, samplers and streams, through wrappers."""
    waiting, seen = [loader], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [getattr(part, name, None) for name in ("dataset", "sampler", "batch_sampler", "batches", "stream")]


class Trial:
    """One strategy, alive on all ranks from `start` to `close`. All ranks call the same methods in the same order."""

    def __init__(
        self,
        ctx: Context,
        strategy: Strategy,
        coordinator: Coordinator,
        feed: BatchCache,
        timeout_s: float,
        *,
        limit_s: float = math.inf,
    ) -> None:
        self.strategy = strategy
        self.startup_s = self.first_step_s = 0.0  # until the end of the first step; of it on the slowest rank
        self._base, self._feed = ctx, feed
        self._device = ctx.device
        self._applied: Context | None = None
        self._result: AccelerateResult | None = None
        self._batches: Iterator[Any] = iter(())
        self._memory = PeakMemory(self._device)
        self.is_overdue = False  # True if the trial ended because it took longer than `limit_s`
        self._limit_s = limit_s
        what = f"the dry run of {strategy}"
        self._guard = FaultBarrier(ctx.world, coordinator, self._release, timeout_s=timeout_s, what=what)

    @property
    def failure(self) -> str | None:
        """The first failure on any rank, the same on all."""
        return "its time was over before it was ready" if self.is_overdue else self._guard.failure

    @property
    def elapsed_s(self) -> float:
        """Rank 0's seconds since this trial began, as of its last phase."""
        return self._guard.elapsed_s

    def start(self) -> bool:
        """Apply, build, verify the first pass, and take a step; returns True if all ranks succeeded."""
        for phase in (self._guard.connect, self._build, self._check):
            if self._guard.together(phase) is None:
                return False
            self.is_overdue = self.elapsed_s > self._limit_s
            if self.is_overdue:
                return False
        seconds = self._guard.together(self._first_step)
        self.startup_s = self.elapsed_s
        self.first_step_s = max(seconds or [0.0])
        return seconds is not None

    def step(self) -> float | None:
        """Seconds of one step on the slowest rank; None if a rank failed."""
        seconds = self._guard.together(self._timed_step)
        return None if seconds is None else max(seconds)

    def peak_bytes(self) -> float | None:
        """The highest peak of all ranks; None if a rank failed. CUDA counts it in any step, others in one more."""

        def watched() -> float:
            with self._memory.watching():
                if self._device.type != "cuda":
                    self._timed_step()
            return self._memory.peak_bytes

        peaks = self._guard.together(watched)
        return None if peaks is None else max(peaks)

    @property
    def memory_kind(self) -> str:
        return self._memory.kind

    def close(self) -> None:
        self._guard.close()

    def _release(self) -> None:
        self._applied, self._result, self._batches = None, None, iter(())

    def _build(self) -> None:
        in_parts = self.strategy.num_parameter_shards > 1
        ctx = self.strategy.apply(candidate(self._base, in_parts=in_parts))
        self._applied, self._result = ctx, ctx.build()
        place = (0, 1) if ctx.mesh is None else (ctx.mesh.rank(*BATCH_AXES), ctx.mesh.size(*BATCH_AXES))
        self._batches = itertools.cycle(self._feed.batches(*place))

    def _check(self) -> bool:
        """Check that the first pass equals plain training's, and that the model can still be evaluated."""
        expected = self._base.plain_pass
        if expected is not None:
            assert self._applied is not None, "built"
            assert self._result is not None, "built"
            cannot = cannot_evaluate(self._applied, self._result, expected)  # first: it fails before compilers run
            if cannot is not None:
                raise StrategyError(cannot)
            check(self._applied, self._result, expected)
        return True

    def _first_step(self) -> float:
        seconds, loss = self._step()
        if not bool(torch.isfinite(loss).all()):
            raise ArithmeticError(f"the loss of the first step is {float(loss)}")
        return seconds

    def _timed_step(self) -> float:
        return self._step()[0]

    def _step(self) -> tuple[float, torch.Tensor]:
        assert self._result is not None, "started"
        self._synchronize()
        start = time.perf_counter()
        loss = self._result.step(next(self._batches))
        self._synchronize()
        return time.perf_counter() - start, loss

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
