"""Arrivals of processes at a place where others wait for them, as the job's store tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from atorch.errors import ArgumentError

T = TypeVar("T")
GRACE = timedelta(seconds=2)  # by how much later others may notice that an exchange has failed


class NoAnswerError(ArgumentError, RuntimeError):
    """An exchange between processes that failed, with who did not come to it."""


class Arrivals:
    """Ranks of a group that have come to a place, as its store tells without any of them waiting."""

    def __init__(self, call: str, place: str, group: dist.ProcessGroup) -> None:
        self.store, self.ranks = dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(group)
        self.place, self._call = f"atorch/{place}/{group.group_name}", call
        self.number = self.store.add(f"{self.place}/{dist.get_rank()}", 1)  # how many times this process was here

    def missing(self) -> list[int]:
        """Ranks that have been here less often than this process."""
        return [rank for rank in self.ranks if self.store.add(f"{self.place}/{rank}", 0) < self.number]

    def told(self) -> str:
        missing, own = self.missing(), f"{self._call} is called on rank {dist.get_rank()}"
        return f"{own} but not on {listed(missing)}; call it on all together" if missing else own


def answered(exchange: Callable[[], T], group: dist.ProcessGroup) -> T:
    """The result of an `exchange` that no process of `group` can leave before all have come.

    Nothing is noted while all is well: those that waited in vain note it then, so the others are who did not come.

    Raises:
        NoAnswerError: one did not come in time, or has ended. Known GRACE after the group's time-out.
    """
    try:
        return exchange()
    except NoAnswerError:
        raise
    except RuntimeError as error:  # torch's own for this are kinds of it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NoAnswerError(f"{_who_came(group)} ({reason})") from error


def _who_came(group: dist.ProcessGroup) -> str:
    try:
        here = Arrivals("an exchange", "in vain", group)
        end = time.monotonic() + GRACE.total_seconds()
        while (missing := here.missing()) and time.monotonic() < end:
            time.sleep(0.05)
    except RuntimeError:  # the store went with the process that held it
        return "an exchange between processes failed, and the process that holds their store has ended"
    if not missing:
        return "all processes came to an exchange, and lost their connection in it"
    came = [rank for rank in here.ranks if rank not in missing]
    return (
        f"{_ranks(missing)} did not come to an exchange in which {_ranks(came)} waited: look there for what happened "
        "first, an error or an endless wait"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
