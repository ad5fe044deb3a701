"""Work that may fail on any rank, which all do together: each says how it went before any goes on.

They tell each other over a group of the crew's, which the work never uses. The work's own collectives run on a group
of its own. A rank that fails closes it, which wakes peers that wait for it there (over gloo at once; over nccl a
watcher on each rank aborts it); failing that, its timeout does. What takes longer than it may is given up on all ranks
(`deadline`). What is not survived: a process that dies, and work that waits for its peers on another group.
"""

from __future__ import annotations

import gc
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

from atorch.auto.planner.deadline import Overdue, deadline, running
from atorch.distributed.collectives import from_rank_zero, gather_objects, stand_on
from atorch.distributed.mesh import Mesh, current, use_mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError, AtorchError

T = TypeVar("T")


class Crew:
    """All processes of the job, who agree over a host group of their own."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None

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
            else (type(failed) if isinstance(failed, AtorchError) else ArgumentError, described(failed))
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


@contextmanager
def quick_collections() -> Iterator[None]:
    """Inside, garbage is looked for among what is made inside: a process has a million other objects to go through."""
    if gc.get_freeze_count():  # somebody else's, who would miss them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Guard:
    """Phases of one undertaking. All ranks call the same methods in the same order.

    Args:
        let_go: called where a phase fails, before the group is closed; drops what holds the group.
        limit_s: seconds for all phases together.
    """

    def __init__(
        self, world: World, crew: Crew, let_go: Callable[[], None], *, timeout_s: float, limit_s: float = math.inf
    ) -> None:
        self.failure: str | None = None  # the first failure on any rank, the same on all
        self.is_overdue = False  # whether that was that it took longer than `limit_s`
        self.elapsed_s = 0.0  # rank 0's seconds since the beginning, as of its last phase
        self.mesh: Mesh | None = None  # the one that a phase has made
        self._crew, self._let_go, self._device = crew, let_go, world.device
        self._limit_s, self._before, self._began = limit_s, running(), time.monotonic()
        self._group = None
        if world.size > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=max(timeout_s, 1.0)))

    def connect(self) -> None:
        """The first phase."""
        # Over nccl the first collective connects, and nothing can wake who waits in that for a rank that failed before.
        if self._group is not None and self._device.type == "cuda":
            dist.all_reduce(torch.zeros((), device=self._device), group=self._group)

    def together(self, work: Callable[[], Any]) -> list[Any] | None:
        """What `work` returns on each rank; None, and everything closed, where it raised on any."""
        value, failed, left_s = None, None, self._limit_s - (time.monotonic() - self._began)
        try:
            around = (stand_on(self._group), use_mesh(self.mesh), _Watcher(self._group, self._device), _same_modes())
            with ExitStack() as stack:
                for each in (*around, deadline(left_s, self._before)):
                    stack.enter_context(each)
                try:
                    value = work()
                finally:
                    self.mesh = current()  # also where it raised: peers may be waiting in the mesh's groups
        except (Exception, Overdue) as error:  # users' modules and third parties' methods may raise anything
            failed = (time.time(), described(error), isinstance(error, Overdue))
            traceback.clear_frames(error.__traceback__)  # they hold what was made, and that its group
        if failed is not None:
            self.close()
        reports = self._crew.gather((failed, value, time.monotonic() - self._began))
        self.elapsed_s = float(reports[0][2])
        failures = [(*report[0], rank) for rank, report in enumerate(reports) if report[0] is not None]
        if not failures:
            return [report[1] for report in reports]
        _, what, self.is_overdue, rank = min(failures)
        self.failure = f"{what} (on rank {rank})" if len(reports) > 1 else what
        if failed is None:
            self.close()
        return None

    def close(self) -> None:
        """Let go of everything that was made, and of the groups that it communicates over."""
        self._let_go()
        mesh, self.mesh, group, self._group = self.mesh, None, self._group, None
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


def described(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    if isinstance(error, Overdue):
        return "its time was over before it was ready"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def forget_compiled() -> None:
    """Drop what was compiled for candidates that are gone, so that it does not count against later ones."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
