"""Arrivals of ranks at an exchange or a barrier, counted in the job's store, to name the ranks that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from atorch.errors import ArgumentError

T = TypeVar("T")
GRACE = timedelta(seconds=2)  # the time that other ranks may take to notice that an exchange has failed


class MissingRanksError(ArgumentError, RuntimeError):
    """An exchange between processes failed; the message names the ranks that did not take part."""


class Arrivals:
    """Counts in the store how often each rank of a group came to a place; reading them waits for nobody."""

    def __init__(self, call: str, place: str, group: dist.ProcessGroup) -> None:
        self.store, self.ranks = dist.distributed_c10d._get_default_store(), dist.get_process_group_ranks(group)
        self.place, self._call = f"atorch/{place}/{group.group_name}", call
        self.number = self.store.add(f"{self.place}/{dist.get_rank()}", 1)  # the arrivals of this process

    def missing(self) -> list[int]:
        """The ranks that have arrived less often than this process."""
        return [rank for rank in self.ranks if self.store.add(f"{self.place}/{rank}", 0) < self.number]

    def message(self) -> str:
        missing, here = self.missing(), f"{self._call} is called on rank {dist.get_rank()}"
        return f"{here} but not on {listed(missing)}; call it on all together" if missing else here


def answered(exchange: Callable[[], T], group: dist.ProcessGroup) -> T:
    """The result of an `exchange` that no process of `group` can leave before all have entered it.

    Writes to the store only after a failure: ranks that waited in vain register there, so the rest are missing.

    Raises:
        MissingRanksError: a rank did not come in time, or has ended. Raised GRACE after the group's time-out.
    """
    try:
        return exchange()
    except MissingRanksError:
        raise
    except RuntimeError as error:  # the base class of torch's errors of collectives
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MissingRanksError(f"{_who_came(group)} ({reason})") from error


def _who_came(group: dist.ProcessGroup) -> str:
    try:
        arrivals = Arrivals("an exchange", "in vain", group)
        end = time.monotonic() + GRACE.total_seconds()
        while (missing := arrivals.missing()) and time.monotonic() < end:
            time.sleep(0.05)
    except RuntimeError:  # the process that hosts the store has ended
        return "an exchange between processes failed, and the process that holds their store has ended"
    if not missing:
        return "all processes came to an exchange, and lost their connection in it"
    came = [rank for rank in arrivals.ranks if rank not in missing]
    return (
        f"{_ranks(missing)} did not come to an exchange in which {_ranks(came)} waited: look there for what happened "
        "first, an error or an endless wait"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:8])) + (", …" if len(items) > 8 else "")
