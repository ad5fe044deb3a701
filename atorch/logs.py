"""The logger of atorch. With several ranks only rank 0 logs, except messages about a single rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("atorch")
OF_THIS_RANK: Mapping[str, bool] = {"of_this_rank": True}
"""`extra` of messages that every rank may log."""


class _RankFilter(logging.Filter):
    """With several ranks, pass messages of rank 0 and those about one rank; prefix messages with the rank."""

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
    """Prefix the logger's messages with the rank from now on, and log common messages on rank 0 alone.

    rank: returns this process's rank at the time of a message; None without a job, which disables the filter.
    """
    for old in list(logger.filters):
        logger.removeFilter(old)
    logger.addFilter(_RankFilter(rank))


@functools.cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message once per process."""
    logger.log(level, message)


@contextmanager
def muted(name: str) -> Iterator[None]:
    """Silence another library's logger inside: it would show tracebacks of attempts that may fail."""
    other = logging.getLogger(name)
    was_disabled = other.disabled
    other.disabled = True
    try:
        yield
    finally:
        other.disabled = was_disabled


@contextmanager
def verbose_logging(more: bool) -> Iterator[None]:
    """With `more`, also show messages of level INFO inside, on standard error if no handler exists."""
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
