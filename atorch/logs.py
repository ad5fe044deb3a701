"""One logger, which names the rank once there are several."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("atorch")


class _RankFilter(logging.Filter):
    """Prefix each message with the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "ranked", False):
            record.msg, record.ranked = f"[rank {self.rank}] {record.msg}", True
        return True


def name_rank(rank: int) -> None:
    """Let the logger's messages say which rank speaks from now on."""
    for old in list(logger.filters):
        logger.removeFilter(old)
    logger.addFilter(_RankFilter(rank))


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
