"""One logger, which names the rank once there are several."""

from __future__ import annotations

import logging

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
