"""Streams that are sharded before they are read: each rank decodes its own part, and all ranks stop together.

A stream can be sharded if it has `num_shards` and `shard(num_shards=count, index=rank)`, which returns one of `count`
parts. These are the names of Hugging Face's `datasets`; any IterableDataset may have them.

Parts may end at different times, and the other ranks would wait in backward for a rank without a batch. So all ranks
exchange before each batch if they have one, and all stop when one has none.
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
    """Part `rank` of `size` of a stream; None where it has no equal number of shards for all ranks.

    Raises:
        ArgumentError: `shard` returned no stream, or the stream is a part already.
    """
    if getattr(stream, "_distributed", None) is not None:  # `datasets` has no public way to detect a split
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
    """Yield `batches` as long as all ranks of `group` have one. Collective: all ranks must iterate.

    Fetches the next batch and starts its exchange before it yields the current one, so they overlap with the step.

    Raises:
        ArgumentError: on all ranks, if one has no batch at all, or failed to read one. That one raises its own error.
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
    """One batch, or the error of reading it, with the exchange of the states of all ranks."""

    def __init__(self, batches: Iterator[Any], group: dist.ProcessGroup) -> None:
        self.batch: Any = None
        self.error: Exception | None = None
        local = _HAS_ONE
        try:
            self.batch = next(batches)
        except StopIteration:
            local = _ENDED
        except Exception as error:  # users' code may raise anything; the others would wait in backward
            self.error, local = error, _FAILED
        self._worst = torch.tensor(local)  # on the host, with its own backend, so that a busy device delays no rank
        work: Any = dist.all_reduce(self._worst, dist.ReduceOp.MAX, group=group, async_op=True)
        self._wait: Callable[[], object] = work.wait

    def state(self) -> int:
        """The worst state of any rank; waits for all."""
        self._wait()
        return int(self._worst)
