"""Streams that can be divided before they are read: each process decodes its own part, and all stop together.

A stream is divided where it says how: `num_shards`, and `shard(num_shards=count, index=place)`, which gives one of
`count` parts. Those are the names of Hugging Face's `datasets`; any IterableDataset may have them.

Parts may end at different times, and a process without a batch would leave the others waiting in backward. So all tell
before each batch whether they have one, and none goes on where one has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from atorch.errors import ArgumentError, shown
from atorch.logs import logger

_HAS_ONE, _ENDED, _FAILED = range(3)


def part_of(stream: IterableDataset[Any], rank: int, size: int) -> IterableDataset[Any] | None:
    """Part `rank` of `size` of a stream; None where it cannot be divided into equally many shards for each.

    Raises:
        ArgumentError: `shard` gave no stream, or what is given is a part already.
    """
    if getattr(stream, "_distributed", None) is not None:  # which `datasets` says nowhere else
        raise ArgumentError(
            "the stream was divided already, by split_dataset_by_node, and would be divided again; give the whole one, "
            "of which each process is given its part"
        )
    num_shards, shard = getattr(stream, "num_shards", None), getattr(stream, "shard", None)
    if not isinstance(num_shards, int) or not callable(shard):
        return None
    if num_shards < 1 or num_shards % size:
        logger.warning(
            "the stream has %d shards, which do not divide over %d processes that see different samples: each of them "
            "reads all of it and keeps its own samples; make the shards a multiple of %d to read each once",
            num_shards, size, size,
        )  # fmt: skip
        return None
    part = shard(num_shards=size, index=rank)
    if not isinstance(part, IterableDataset):
        raise ArgumentError(
            f"{type(stream).__name__}.shard(num_shards={size}, index={rank}) returned {shown(part)}; it returns an "
            "IterableDataset of that part's samples"
        )
    return part


def in_step(batches: Iterator[Any], group: dist.ProcessGroup) -> Iterator[Any]:
    """`batches` for as long as all processes of `group` have one; all of them must iterate.

    The next batch is fetched, and the others are told, before this one is given: nobody waits while a step computes.

    Raises:
        ArgumentError: on all, where one has no batch at all, or failed to read one. That one raises its own error.
    """
    fetched, count = _Fetched(batches, group), 0
    while True:
        state = fetched.state()
        if state == _FAILED:
            raise fetched.error or ArgumentError(
                "another process failed to read its part of the stream; its own error says why"
            )
        if state == _ENDED and not count:
            raise ArgumentError(
                "a process has no full batch in its part of the stream, so that none could train; use a smaller "
                "batch_size, fewer DataLoader workers, or shards of equal size"
            )
        if state == _ENDED:
            return
        batch, count = fetched.batch, count + 1
        fetched = _Fetched(batches, group)
        yield batch


class _Fetched:
    """One batch, or why there is none, and what the others say of theirs."""

    def __init__(self, batches: Iterator[Any], group: dist.ProcessGroup) -> None:
        self.batch: Any = None
        self.error: Exception | None = None
        mine = _HAS_ONE
        try:
            self.batch = next(batches)
        except StopIteration:
            mine = _ENDED
        except Exception as error:  # users' code may raise anything; the others would wait in backward
            self.error, mine = error, _FAILED
        self._worst = torch.tensor(mine)  # on the host, over its own backend: a busy device delays nobody
        work: Any = dist.all_reduce(self._worst, dist.ReduceOp.MAX, group=group, async_op=True)
        self._wait: Callable[[], object] = work.wait

    def state(self) -> int:
        """The worst that any process has to tell."""
        self._wait()
        return int(self._worst)
