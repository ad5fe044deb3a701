"""A strategy on trial: applied to a candidate and stepped on all ranks, together, whatever goes wrong on any of them.

Every phase is guarded: each rank says how it went before any goes on, over a group that candidates never use. The
candidate's own collectives run on a group of its own. A rank that fails closes it, which wakes peers that wait for it
there (over gloo at once; over nccl a watcher on each rank aborts it); failing that, its timeout does. What takes longer
than it may is given up on all ranks, in the middle of compiling too (`deadline`). What is not survived: a process that
dies, and a method that waits for its peers on a group that is not the mesh's.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch.auto.context import AccelerateResult, Context
from atorch.auto.first_pass import cannot_evaluate, check
from atorch.auto.planner.candidate import Feed, candidate
from atorch.auto.planner.deadline import Overdue, deadline, running
from atorch.auto.strategy import Strategy
from atorch.distributed.collectives import from_rank_zero, gather_objects, stand_on
from atorch.distributed.mesh import BATCH_AXES, Mesh, current, use_mesh
from atorch.distributed.world import TIMEOUT, World
from atorch.errors import ArgumentError, AtorchError, StrategyError
from atorch.profiler.memory import PeakMemory

T = TypeVar("T")


class Crew:
    """All processes of the job, who agree over a host group of their own."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if world.size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's plain value."""
        return gather_objects(value, self._group)

    def hear(self, value: Any) -> Any:
        """Rank 0's value."""
        return from_rank_zero(value, self._group)

    def led(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which alone does it, on every rank.

        Raises:
            Exception: on rank 0 whatever `work` raises, on the others an error of that kind if it is one of atorch's,
                else an ArgumentError; both name it.
        """
        value, failed = None, None
        if self._rank == 0:
            try:
                value = work()
            except Exception as error:  # no rank may be left waiting, whatever it is
                failed = error
        told = self.hear(
            None
            if failed is None
            else (type(failed) if isinstance(failed, AtorchError) else ArgumentError, _described(failed))
        )
        if failed is not None:
            raise failed
        if told is not None:
            raise told[0](f"rank 0 failed: {told[1]}")
        heard: T = self.hear(value)
        return heard

    def close(self) -> None:
        """End the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class Trial:
    """One strategy, alive on all ranks from `start` to `close`. All ranks call the same methods in the same order."""

    def __init__(
        self,
        ctx: Context,
        strategy: Strategy,
        crew: Crew,
        feed: Feed,
        timeout_s: float,
        *,
        limit_s: float = math.inf,
    ) -> None:
        self.strategy = strategy
        self.failure: str | None = None  # the first failure on any rank, the same on all
        self.is_overdue = False  # whether that was that it took longer than `limit_s`
        self.startup_s = 0.0
        self._base, self._crew, self._feed = ctx, crew, feed
        self._device = ctx.device
        self._mesh: Mesh | None = None
        self._applied: Context | None = None
        self._result: AccelerateResult | None = None
        self._batches: Iterator[Any] = iter(())
        self._limit_s, self._before = limit_s, running()
        self._began, self._elapsed_s = time.monotonic(), 0.0
        self._memory = PeakMemory(self._device)
        self._group = None
        if ctx.world.size > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=max(timeout_s, 1.0)))

    @property
    def elapsed_s(self) -> float:
        """Rank 0's seconds since this trial began, as of its last phase."""
        return self._elapsed_s

    def start(self) -> bool:
        """Apply, build, hold the first pass to plain training's, and take a step; whether all ranks could."""
        for phase in (self._connect, self._build, self._check):
            if self._together(phase) is None:
                return False
        seconds = self._together(self._first_step)
        self.startup_s = self.elapsed_s
        return seconds is not None

    def step(self) -> float | None:
        """Seconds of one step on the slowest rank; None where a rank failed."""
        seconds = self._together(self._timed_step)
        return None if seconds is None else max(seconds)

    def peak_bytes(self) -> float | None:
        """The peak, after one more step, on the rank that holds most; None where a rank failed."""

        def watched() -> float:
            with self._memory.watching():
                self._timed_step()
            return self._memory.peak_bytes

        peaks = self._together(watched)
        return None if peaks is None else max(peaks)

    @property
    def memory_kind(self) -> str:
        """How peak bytes are measured on this device."""
        return self._memory.kind

    def close(self) -> None:
        """Let go of everything: the copy, its optimizer, and the groups they communicate over."""
        self._applied, self._result, self._batches = None, None, iter(())
        mesh, self._mesh, group, self._group = self._mesh, None, self._group, None
        gc.collect()  # models that hook into themselves are cycles, and hold the group
        if mesh is not None:
            with stand_on(group):
                mesh.close()
        if group is not None:
            dist.destroy_process_group(group)
        del group, mesh
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _connect(self) -> None:
        # Over nccl the first collective connects, and nothing can wake who waits in that for a rank that failed before.
        if self._group is not None and self._device.type == "cuda":
            dist.all_reduce(torch.zeros((), device=self._device), group=self._group)

    def _build(self) -> None:
        try:
            ctx = self.strategy.apply(candidate(self._base))
        finally:
            self._mesh = current()  # also where a later method raised: peers may be waiting in the mesh's groups
        self._applied, self._result = ctx, ctx.build()
        place = (0, 1) if ctx.mesh is None else (ctx.mesh.rank(*BATCH_AXES), ctx.mesh.size(*BATCH_AXES))
        self._batches = itertools.cycle(self._feed.batches(*place))

    def _check(self) -> bool:
        """That it computes what plain training does, and that the model can still be evaluated."""
        expected = self._base.plain_pass
        if expected is not None:
            assert self._applied is not None, "built"
            assert self._result is not None, "built"
            check(self._applied, self._result, expected)
            cannot = cannot_evaluate(self._applied, self._result, expected)
            if cannot is not None:
                raise StrategyError(cannot)
        return True

    def _first_step(self) -> float:
        loss = self._step()
        if not bool(torch.isfinite(loss).all()):
            raise ArithmeticError(f"the loss of the first step is {float(loss)}")
        return 0.0

    def _timed_step(self) -> float:
        self._synchronize()
        start = time.perf_counter()
        self._step()
        self._synchronize()
        return time.perf_counter() - start

    def _step(self) -> torch.Tensor:
        assert self._result is not None, "started"
        loss: torch.Tensor = self._result.step(next(self._batches))
        return loss

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _together(self, work: Callable[[], Any]) -> list[Any] | None:
        """What `work` returns on each rank; None, and everything closed, where it raised on any."""
        value, failed, left_s = None, None, self._limit_s - (time.monotonic() - self._began)
        try:
            around = (stand_on(self._group), use_mesh(self._mesh), _Watcher(self._group, self._device), _same_modes())
            with ExitStack() as stack:
                for each in (*around, deadline(left_s, self._before)):
                    stack.enter_context(each)
                value = work()
        except (Exception, Overdue) as error:  # users' modules and third parties' methods may raise anything
            failed = (time.time(), _described(error), isinstance(error, Overdue))
            traceback.clear_frames(error.__traceback__)  # they hold the candidate, and that its group
        if failed is not None:
            self.close()
        reports = self._crew.gather((failed, value, time.monotonic() - self._began))
        self._elapsed_s = float(reports[0][2])
        failures = [(*report[0], rank) for rank, report in enumerate(reports) if report[0] is not None]
        if not failures:
            return [report[1] for report in reports]
        _, what, self.is_overdue, rank = min(failures)
        self.failure = f"{what} (on rank {rank})" if len(reports) > 1 else what
        if failed is None:
            self.close()
        return None


class _Watcher:
    """Aborts a group over nccl on this rank once a peer has given it up: its kernels would wait for ever."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group if group is not None and device.type == "cuda" else None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._group is not None:
            self._key = f"atorch/given_up/{self._group.group_name}"
            self._store = dist.distributed_c10d._get_default_store()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is None or self._group is None:
            return
        if kind is not None:
            self._store.set(self._key, "")
            self._group.abort()
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.25):
            if self._group is not None and self._store.check([self._key]):
                self._group.abort()
                return


@contextmanager
def _same_modes() -> Iterator[None]:
    """What is interrupted may leave autograd or autocast as it was inside; afterwards they are as before."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    grad, autocast, dtype = torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled(kind, autocast)
        torch.set_default_dtype(dtype)


def _described(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    if isinstance(error, Overdue):
        return "its time was over before it was ready"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def forget_compiled() -> None:
    """Drop what was compiled for candidates that are gone, so that it does not count against later ones."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
