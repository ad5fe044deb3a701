"""Runs work that may fail on any rank on all ranks together: every rank reports its outcome before any continues.

Reports go over a group of the Coordinator, which the work never uses. The work's own collectives use groups of its own:
one of all ranks, and those that it makes along axes. A rank that fails closes them, which wakes peers that wait there,
over gloo at once; otherwise their timeout does. An NCCL kernel does not wake, nor does a host that waits for it, and
torch ends a process whose group times out. So with NCCL a thread of each rank polls the job's store for a failed peer,
and the clock, and aborts (`Watch`). A process that dies is not handled.

`adopt` applies a search's choice to the user's own model, and undoes it on failure. The choice ran on copies. The model
itself may still fail: memory is short, or it has state that copies lack.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from atorch.auto.context import Context
from atorch.auto.strategy import Strategy
from atorch.distributed.barrier_diagnostics import MissingRanksError
from atorch.distributed.collectives import all_or_none, from_rank_zero, gather_objects, use_world_group
from atorch.distributed.mesh import Mesh, current, set_current, use_mesh
from atorch.distributed.rng import RandomState
from atorch.distributed.world import World
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.model.state import Snapshot
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.planner.plan import Plan


T = TypeVar("T")
LOOK_S = 0.25  # interval of checks of the store and the clock
EARLY_S = 10.0  # the watch aborts this long before torch would end the process


class Coordinator:
    """Exchanges values between all processes of the job over a host group of its own."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._group)

    def broadcast(self, value: Any) -> Any:
        return from_rank_zero(value, self._group)

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and broadcast its result; an error is raised on all, as `all_or_none` does."""
        result: T = self.broadcast(all_or_none(lambda: work() if self._rank == 0 else None, self._group))
        return result

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@contextmanager
def quick_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collections inside, as a process has a million of them to scan."""
    if gc.get_freeze_count():  # objects that others froze must stay frozen
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class FaultBarrier:
    """Runs the phases of one piece of work. All ranks call the same methods in the same order.

    Args:
        on_failure: called when a phase fails, before the group is closed; drops objects that hold the group.
        timeout_s: seconds that a rank waits for its peers in a phase.
        what: the work, as an error names it if a rank does not come back from it.
    """

    def __init__(
        self, world: World, coordinator: Coordinator, on_failure: Callable[[], None], *, timeout_s: float, what: str
    ) -> None:
        self._what = what
        self.failure: str | None = None  # the first failure on any rank, the same on all
        self.elapsed_s = 0.0  # rank 0's seconds since the beginning, as of its last phase
        self.mesh: Mesh | None = None  # the mesh that a phase made
        self._coordinator, self._on_failure, self._device = coordinator, on_failure, world.device
        self._timeout_s, self._began, self._is_on_cuda = timeout_s, time.monotonic(), world.device.type == "cuda"
        self._group = None
        self._made: dict[dist.ProcessGroup, None] = {}  # groups that the phases made
        self._others: Set[dist.ProcessGroup] = frozenset()  # other groups that existed when this phase began
        if world.size > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=timeout_s + (EARLY_S if self._is_on_cuda else 0.0)))

    def connect(self) -> None:
        # NCCL connects in the first collective, and nothing wakes ranks that wait there for a rank that failed before.
        if self._group is not None and self._is_on_cuda:
            dist.all_reduce(torch.zeros((), device=self._device), group=self._group)

    def together(self, work: Callable[[], Any]) -> list[Any] | None:
        """The result of `work` on each rank; None, with everything closed, if it raised on any."""
        value, failure = None, None
        watch = self._watch()
        try:
            with use_world_group(self._group), use_mesh(self.mesh), watch or nullcontext():
                try:
                    value = work()
                finally:
                    self.mesh = current()  # also after an error: peers may be waiting in the mesh's groups
                    if watch is not None:
                        self._own_groups()
            if watch is not None and watch.aborted:  # aborted collectives need not raise
                raise RuntimeError("a peer failed, or was waited for too long")
        except Exception as error:  # users' modules and third parties' methods may raise anything
            failure = (time.time(), described(error))
            traceback.clear_frames(error.__traceback__)  # frames hold objects of the work, and these the group
        if failure is not None:
            self.close()
        try:
            reports = self._coordinator.gather((failure, value, time.monotonic() - self._began))
        except MissingRanksError as error:
            raise MissingRanksError(f"{self._what} did not end on all processes: {error}") from error
        self.elapsed_s = float(reports[0][2])
        failures = [(*report[0], rank) for rank, report in enumerate(reports) if report[0] is not None]
        if not failures:
            return [report[1] for report in reports]
        _, message, rank = min(failures)
        self.failure = f"{message} (on rank {rank})" if len(reports) > 1 else message
        if failure is None:
            self.close()
        return None

    def _watch(self) -> Watch | None:
        """A watch for the next phase; None if closing a group wakes ranks that wait in it."""
        if self._group is None or not self._is_on_cuda:
            return None
        self._others = {group for group in _groups() if group not in self._made}
        key = f"atorch/given_up/{self._group.group_name}"
        return Watch(self._own_groups, dist.distributed_c10d._get_default_store(), key, self._timeout_s)

    def _own_groups(self) -> list[dist.ProcessGroup]:
        """The group of all ranks, and groups that this and earlier phases made."""
        now = _groups()
        self._made.update((group, None) for group in now if group not in self._others)
        return [group for group in now if group in self._made or group is self._group]

    def close(self) -> None:
        """Drop all objects of the work, and close its groups."""
        self._on_failure()
        mesh, self.mesh, group, self._group = self.mesh, None, self._group, None
        self._made.clear()
        self._others = frozenset()
        gc.collect()  # models that hook into themselves are cycles, and hold the group
        if mesh is not None:
            with use_world_group(group):
                mesh.close()
        if group is not None:
            dist.destroy_process_group(group)
            del group, mesh
            gc.collect()
        if self._is_on_cuda:
            torch.cuda.empty_cache()


class Watch:
    """Aborts this process's collectives in a phase of work once a peer has failed in it, or the timeout is over.

    Args:
        groups: returns the groups that the work communicates over by now.
        store: the job's store, shared by all processes; `key` is set in it once one has failed.
        timeout_s: seconds until the work has waited too long.
    """

    def __init__(
        self, groups: Callable[[], Sequence[dist.ProcessGroup]], store: Any, key: str, timeout_s: float
    ) -> None:
        self._groups, self._store, self._key, self._until = groups, store, key, time.monotonic() + timeout_s
        self._done, self._lock = threading.Event(), threading.Lock()
        self.aborted: list[dist.ProcessGroup] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._give_up()
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(LOOK_S):
            if self.aborted or self._store.check([self._key]):
                self._abort()  # again: work that goes on may have made more
            elif time.monotonic() >= self._until:
                self._give_up()

    def _give_up(self) -> None:
        self._store.set(self._key, "")
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            new = [group for group in self._groups() if group not in self.aborted]
            self.aborted += new
            with _at_once(new):
                for group in new:
                    group.abort()


@contextmanager
def _at_once(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Abort NCCL groups inside together: a single abort would wait for kernels that another abort wakes."""
    # As torch's own abort of all groups does it: https://github.com/pytorch/pytorch/issues/119797
    backend: Any = groups[0]._get_backend(torch.device("cuda")) if groups else None
    if not hasattr(backend, "_group_start"):
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def described(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def forget_compiled() -> None:
    """Drop code that was compiled for earlier candidates, so that it does not count towards limits of later ones."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


MAX_ATTEMPTS = 24  # at applying the choice and the next best ones
MAX_KEPT = 50  # rejected compositions in a strategy's report


def adopt(ctx: Context, strategy: Strategy, plan: Plan, accelerate: Callable[..., T]) -> T:
    """Apply the search's choice, or the next best one after a failure, which leaves the model as before.

    Raises:
        NoFeasiblePlanError, StrategyError: all failed, or `MAX_ATTEMPTS` did.
    """
    for _ in range(MAX_ATTEMPTS):
        if plan.baseline is not None and plan.baseline.strategy == plan.strategy:
            return accelerate(ctx, strategy)
        need = None if plan.measured or plan.estimate is None else plan.estimate.memory.get("optimizer", 0.0)
        made, failure = attempt(ctx, partial(accelerate, strategy=strategy), need)
        if made is not None:
            return made
        assert plan.instead is not None, "of a search"
        plan = plan.instead(str(failure))
        logger.warning("%s", plan.notes[-1])
        metadata = {**strategy.metadata, "report": trimmed(plan.to_json_data())}
        strategy = replace(plan.strategy, metadata=metadata)
    raise StrategyError(f"{MAX_ATTEMPTS} strategies failed when they were applied: {plan.notes[-1]}")


def trimmed(report: dict[str, Any]) -> dict[str, Any]:
    """The report for a strategy's file: without compositions that were not run, whose estimates can be made again."""
    rejections = [rejection for rejection in report["rejected"] if rejection["why"] != "not run"][:MAX_KEPT]
    return {**report, "rejected": rejections}


def attempt(ctx: Context, work: Callable[[Context], T], more_bytes: float | None = None) -> tuple[T | None, str | None]:
    """Run `work` on the context's model; returns its result or the reason of a failure. All processes call it together.

    With `more_bytes`, `work` also fails if its peak on a GPU leaves less memory than that. A model that never took a
    step has no optimizer states yet.

    After a failure, the model with its values, buffers and gradients and the random states are restored on all
    processes. Process groups that `work` made are closed.
    """
    snapshot, random_state, results = Snapshot(ctx.root), RandomState.now(), list[T]()
    coordinator = Coordinator(ctx.world)

    def on_failure() -> None:
        results.clear()
        snapshot.restore()  # a sharded model holds the group; ranks that wait in it wake only once it is released

    timeout_s = ctx.world.timeout.total_seconds()
    guard = FaultBarrier(ctx.world, coordinator, on_failure, timeout_s=timeout_s, what="the choice's start")
    isolated = replace(ctx, rescalers=[], fp32_values={})

    def working() -> None:
        is_watched = more_bytes is not None and ctx.device.type == "cuda"
        if is_watched:
            torch.cuda.reset_peak_memory_stats(ctx.device)
        results.append(work(isolated))
        if is_watched:
            needed = torch.cuda.max_memory_allocated(ctx.device) + (more_bytes or 0.0)
            if needed > (room := torch.cuda.mem_get_info(ctx.device)[1]):
                raise MemoryError(
                    f"its first step would need {format_bytes(needed)} of memory, of {format_bytes(room)}"
                )

    try:
        for phase in (guard.connect, working):
            if guard.together(phase) is None:
                random_state.restore()
                forget_compiled()
                return None, guard.failure
        set_current(guard.mesh)
        return results[0], None
    finally:
        coordinator.close()
