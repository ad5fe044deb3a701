"""Work that may fail on any rank, which all do together: each says how it went before any goes on.

They tell each other over a group of the crew's, which the work never uses. The work's own collectives run on groups
of its own: one of all ranks, and those that it makes along axes. A rank that fails closes them, which wakes peers that
wait for it there (over gloo at once; over nccl a watch on each rank aborts them); failing that, their timeout does.
What takes longer than it may is given up on all ranks (`deadline`). What is not survived: a process that dies.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch.auto.planner.deadline import Overdue, deadline, running, same_modes
from atorch.auto.planner.watch import LATE_S, Watch
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
        self._made: dict[dist.ProcessGroup, None] = {}  # the groups that its phases have made
        self._others: Set[dist.ProcessGroup] = frozenset()  # those that were there when this phase began
        if world.size > 1:
            if (
                self._is_watched and limit_s < math.inf
            ):  # torch ends a process whose group times out, the watch does not
                timeout_s = max(timeout_s, limit_s + 2 * LATE_S)
            self._group = dist.new_group(timeout=timedelta(seconds=max(timeout_s, 1.0)))

    def connect(self) -> None:
        """The first phase."""
        # Over nccl the first collective connects, and nothing can wake who waits in that for a rank that failed before.
        if self._group is not None and self._device.type == "cuda":
            dist.all_reduce(torch.zeros((), device=self._device), group=self._group)

    def together(self, work: Callable[[], Any]) -> list[Any] | None:
        """What `work` returns on each rank; None, and everything closed, where it raised on any."""
        value, failed, left_s = None, None, self._limit_s - (time.monotonic() - self._began)
        watch = self._watch(left_s)
        try:
            around = (stand_on(self._group), use_mesh(self.mesh), watch or nullcontext(), same_modes())
            with ExitStack() as stack:
                for each in (*around, deadline(left_s, self._before)):
                    stack.enter_context(each)
                try:
                    value = work()
                finally:
                    self.mesh = current()  # also where it raised: peers may be waiting in the mesh's groups
                    if watch is not None:
                        self._own_groups()
            if watch is not None and watch.is_overdue:  # collectives that were aborted need not raise
                raise Overdue
        except (Exception, Overdue) as error:  # users' modules and third parties' methods may raise anything
            is_late = isinstance(error, Overdue) or (watch is not None and watch.is_overdue)
            failed = (time.time(), described(Overdue() if is_late else error), is_late)
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

    @property
    def _is_watched(self) -> bool:
        return self._device.type == "cuda"

    def _watch(self, left_s: float) -> Watch | None:
        """Over the next phase; None where closing a group wakes who waits in it."""
        if self._group is None or not self._is_watched:
            return None
        self._others = {each for each in _groups() if each not in self._made}
        key = f"atorch/given_up/{self._group.group_name}"
        return Watch(self._own_groups, dist.distributed_c10d._get_default_store(), key, left_s)

    def _own_groups(self) -> list[dist.ProcessGroup]:
        """Those that the phases have made by now, this one with them, and the one of all ranks."""
        now = _groups()
        self._made.update((each, None) for each in now if each not in self._others)
        return [each for each in now if each in self._made or each is self._group]

    def close(self) -> None:
        """Let go of everything that was made, and of the groups that it communicates over."""
        self._let_go()
        mesh, self.mesh, group, self._group = self.mesh, None, self._group, None
        self._made.clear()
        self._others = frozenset()
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


def _groups() -> list[dist.ProcessGroup]:
    """All that this process has."""
    return list(dist.distributed_c10d._world.pg_map)


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
