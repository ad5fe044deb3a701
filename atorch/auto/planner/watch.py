"""Wakes ranks that wait in an NCCL collective for a failed peer, by aborting the groups on this process.

Gloo wakes waiting processes when a peer closes its connections. A kernel of NCCL waits on, the host with it where it
waits for the kernel, and once a collective has taken as long as its group's time-out torch ends the whole process. So a
thread looks at the job's store for a peer that gave up, and at the clock, and aborts before that.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

LOOK_S = 0.25  # how often the store and the clock are looked at
LATE_S = 5.0  # after a limit: what Python can give up by itself has been given up by then


class Watch:
    """A watch over one phase of work: aborts on this process once a peer has failed in it, or it takes too long.

    Args:
        groups: those that the work communicates over by now.
        store: what all processes of the job see; `key` in it says that one has failed.
        limit_s: seconds until the work is overdue; infinity for no limit.
    """

    def __init__(self, groups: Callable[[], Sequence[dist.ProcessGroup]], store: Any, key: str, limit_s: float) -> None:
        self.is_overdue = False  # whether the limit was why it aborted
        self._groups, self._store, self._key = groups, store, key
        self._until = time.monotonic() + limit_s + LATE_S if limit_s < math.inf else math.inf
        self._done, self._lock = threading.Event(), threading.Lock()
        self._aborted: list[dist.ProcessGroup] = []
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
            if time.monotonic() >= self._until:
                self.is_overdue = True
                self._give_up()
            elif self._aborted or self._store.check([self._key]):
                self._abort()  # again: work that goes on may have made more

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
