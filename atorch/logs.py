"""One logger, of which rank 0 alone speaks once there are several, but for what is of one process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("atorch")
OF_THIS_RANK: Mapping[str, bool] = {"of_this_rank": True}
"""`extra` of what is said on whichever rank it happens."""


class _RankFilter(logging.Filter):
    """While there are several ranks, let pass what rank 0 says and what is of one; prefix messages with the rank."""

    def __init__(self, rank: Callable[[], int | None]) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        rank = self.rank()
        if rank is None:
            return True
        if rank and not getattr(record, "of_this_rank", False):
            return False
        if not getattr(record, "ranked", False):
            record.msg, record.ranked = f"[rank {rank}] {record.msg}", True
        return True


def name_rank(rank: Callable[[], int | None]) -> None:
    """Let the logger's messages say which rank speaks from now on, and those that all ranks have be rank 0's.

    rank: what this process is as a message is logged; None where it is none of several, so the end of a job undoes it.
    """
    for old in list(logger.filters):
        logger.removeFilter(old)
    logger.addFilter(_RankFilter(rank))


@functools.cache
def say_once(message: str, level: int = logging.INFO) -> None:
    """Log it, once a process however many objects have it to say."""
    logger.log(level, message)


@contextmanager
def muted(name: str) -> Iterator[None]:
    """Inside, another library's logger says nothing: of what is tried, and may fail, it would show a traceback."""
    other = logging.getLogger(name)
    was = other.disabled
    other.disabled = True
    try:
        yield
    finally:
        other.disabled = was


@contextmanager
def speaking(more: bool) -> Iterator[None]:
    """Inside, with `more`, messages of the level INFO are shown too, on standard error if nothing else handles them."""
    if not more or logger.isEnabledFor(logging.INFO):
        yield
        return
    level, handler = logger.level, None if logger.hasHandlers() else logging.StreamHandler()
    logger.setLevel(logging.INFO)
    if handler is not None:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)
