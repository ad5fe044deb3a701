"""Work that may fail on any rank, which all do together: each says how it went before any goes on.

They tell each other over a group of the crew's, which the work never uses. The work's own collectives run on groups
of its own: one of all ranks, and those that it makes along axes. A rank that fails closes them, which wakes peers that
wait for it there; failing that, their timeout does. Over gloo it does so at once. A kernel of NCCL waits on, the host
with it where it waits for the kernel, and torch ends a process whose group times out: there a thread of each rank looks
at the job's store for a peer that failed, and at the clock, and aborts (`Watch`). What is not survived: a process that
dies.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch.distributed.collectives import from_rank_zero, gather_objects, stand_on
from atorch.distributed.mesh import Mesh, current, use_mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError, AtorchError

T = TypeVar("T")
LOOK_S = 0.25  # how often the store and the clock are looked at
EARLY_S = 10.0  # before torch would end the process


class Coordinator:
    """All processes of the job, who agree over a host group of their own."""

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        return gather_objects(value, self._group)

    def hear(self, value: Any) -> Any:
        """Rank 0's value."""
        return from_rank_zero(value, self._group)

    def led(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, which alone does it, on every rank.

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


class FaultBarrier:
    """Phases of one undertaking. All ranks call the same methods in the same order.

    Args:
        let_go: called where a phase fails, before the group is closed; drops what holds the group.
        timeout_s: what a rank waits in a phase for its peers.
    """

    def __init__(self, world: World, crew: Coordinator, let_go: Callable[[], None], *, timeout_s: float) -> None:
        self.failure: str | None = None  # the first failure on any rank, the same on all
        self.elapsed_s = 0.0  # rank 0's seconds since the beginning, as of its last phase
        self.mesh: Mesh | None = None  # the one that a phase has made
        self._crew, self._let_go, self._device = crew, let_go, world.device
        self._timeout_s, self._began = timeout_s, time.monotonic()
        self._group = None
        self._made: dict[dist.ProcessGroup, None] = {}  # the groups that its phases have made
        self._others: Set[dist.ProcessGroup] = frozenset()  # those that were there when this phase began
        if world.size > 1:
            self._group = dist.new_group(timeout=timedelta(seconds=timeout_s + (EARLY_S if self._is_watched else 0.0)))

    def connect(self) -> None:
        # Over nccl the first collective connects, and nothing can wake who waits in that for a rank that failed before.
        if self._group is not None and self._device.type == "cuda":
            dist.all_reduce(torch.zeros((), device=self._device), group=self._group)

    def together(self, work: Callable[[], Any]) -> list[Any] | None:
        """What `work` returns on each rank; None, and everything closed, where it raised on any."""
        value, failed = None, None
        watch = self._watch()
        try:
            with stand_on(self._group), use_mesh(self.mesh), watch or nullcontext():
                try:
                    value = work()
                finally:
                    self.mesh = current()  # also where it raised: peers may be waiting in the mesh's groups
                    if watch is not None:
                        self._own_groups()
            if watch is not None and watch.has_aborted:  # collectives that were aborted need not raise
                raise RuntimeError("a peer failed, or was waited for too long")
        except Exception as error:  # users' modules and third parties' methods may raise anything
            failed = (time.time(), described(error))
            traceback.clear_frames(error.__traceback__)  # they hold what was made, and that its group
        if failed is not None:
            self.close()
        reports = self._crew.gather((failed, value, time.monotonic() - self._began))
        self.elapsed_s = float(reports[0][2])
        failures = [(*report[0], rank) for rank, report in enumerate(reports) if report[0] is not None]
        if not failures:
            return [report[1] for report in reports]
        _, what, rank = min(failures)
        self.failure = f"{what} (on rank {rank})" if len(reports) > 1 else what
        if failed is None:
            self.close()
        return None

    @property
    def _is_watched(self) -> bool:
        return self._device.type == "cuda"

    def _watch(self) -> Watch | None:
        """Over the next phase; None where closing a group wakes who waits in it."""
        if self._group is None or not self._is_watched:
            return None
        self._others = {each for each in _groups() if each not in self._made}
        key = f"atorch/given_up/{self._group.group_name}"
        return Watch(self._own_groups, dist.distributed_c10d._get_default_store(), key, self._timeout_s)

    def _own_groups(self) -> list[dist.ProcessGroup]:
        """Groups that the phases have made by now, this one with them, and the one of all ranks."""
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


class Watch:
    """Over one phase of work: aborts on this process once a peer has failed in it, or was waited for too long.

    Args:
        groups: those that the work communicates over by now.
        store: what all processes of the job see; `key` in it says that one has failed.
        timeout_s: seconds until the work has waited too long.
    """

    def __init__(
        self, groups: Callable[[], Sequence[dist.ProcessGroup]], store: Any, key: str, timeout_s: float
    ) -> None:
        self._groups, self._store, self._key, self._until = groups, store, key, time.monotonic() + timeout_s
        self._done, self._lock = threading.Event(), threading.Lock()
        self._aborted: list[dist.ProcessGroup] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def has_aborted(self) -> bool:
        """True if collectives of the work were aborted."""
        return bool(self._aborted)

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
            if self._aborted or self._store.check([self._key]):
                self._abort()  # again: work that goes on may have made more
            elif time.monotonic() >= self._until:
                self._give_up()

    def _give_up(self) -> None:
        self._store.set(self._key, "")
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            new = [group for group in self._groups() if group not in self._aborted]
            self._aborted += new
            with _at_once(new):
                for group in new:
                    group.abort()


@contextmanager
def _at_once(groups: Sequence[dist.ProcessGroup]) -> Iterator[None]:
    """Inside, aborts over NCCL are begun and not waited for: each would wait for kernels that another one wakes."""
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
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def forget_compiled() -> None:
    """Drop what was compiled for candidates that are gone, so that it does not count against later ones."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
