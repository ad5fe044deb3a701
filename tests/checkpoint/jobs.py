"""Jobs to save: simulated ranks as threads of one process, tensors in boxes, and whole folders as values."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from atorch.checkpoint import files, reading, shard_file
from atorch.checkpoint.boxes import Box, LogicalTensor, whole_box
from atorch.checkpoint.files import save
from atorch.checkpoint.reading import Checkpoint
from atorch.errors import CheckpointError


class Ranks:
    """Threads that are ranks for the collectives of `files`."""

    def __init__(self, size: int) -> None:
        self.size, self._rank, self._barrier = size, threading.local(), threading.Barrier(size, timeout=60)
        self._values: list[Any] = [None] * size
        self._sent: defaultdict[tuple[int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The results or errors of `work` by rank."""

        def run_as(rank: int) -> Any:
            self._rank.value = rank
            try:
                return work(rank)
            except CheckpointError as error:
                return error
            except BaseException:
                self._barrier.abort()
                raise

        with self._as_world(), ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(run_as, range(self.size)))

    def _gather(self, value: Any) -> list[Any]:
        self._values[self._rank.value] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def _all_or_none(self, work: Callable[[], Any]) -> Any:
        try:
            result, error = work(), None
        except CheckpointError as raised:
            result, error = None, raised
        failed = [other for other in self._gather(error) if other is not None]
        if failed:
            raise error or CheckpointError(str(failed[0]))
        return result

    def _send(self, values: Tensor, other: int) -> Any:
        self._sent[self._rank.value, other].put(values.clone())
        return mock.Mock()

    def _receive(self, values: Tensor, other: int) -> Any:
        sent = self._sent[other, self._rank.value]
        return mock.Mock(wait=lambda: values.copy_(sent.get(timeout=60)))

    @contextmanager
    def _as_world(self) -> Iterator[None]:
        collectives = {
            "gather_objects": self._gather,
            "all_or_none": self._all_or_none,
            "is_distributed": lambda: True,
            "dist": mock.Mock(
                get_rank=lambda: self._rank.value,
                get_world_size=lambda: self.size,
                isend=self._send,
                irecv=self._receive,
            ),
        }
        exchange = {
            "answered": lambda exchange, group: exchange(),
            "present_group": lambda: None,
            "from_rank_zero": lambda value: self._gather(value)[0],
        }
        calls = {"call_on_all_ranks": lambda call, given, work: self._all_or_none(work)}
        with (
            mock.patch.multiple(files, **collectives, **calls),
            mock.patch.multiple(reading, **collectives, **exchange),
        ):
            yield


def whole(values: Tensor) -> LogicalTensor:
    """A tensor that this rank has whole."""
    return LogicalTensor(tuple(values.shape), values.dtype, [(whole_box(values.shape), values)])


def in_boxes(values: Tensor, boxes: Sequence[Box]) -> LogicalTensor:
    """The boxes of `values`, as views."""
    outer = whole_box(values.shape)
    return LogicalTensor(tuple(values.shape), values.dtype, [(box, values[box.slices(outer)]) for box in boxes])


@contextmanager
def small_blocks(num_bytes: int = 32) -> Iterator[None]:
    """Blocks of a few elements, so that small tensors have many."""
    with mock.patch.object(shard_file, "BLOCK_BYTES", num_bytes):
        yield


def bits(values: Tensor) -> bytes:
    """The values as bytes, NaN and all."""
    flat = as_bits(values.detach()).clone(memory_format=torch.contiguous_format).reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def as_bits(values: Tensor) -> Tensor:
    """The values as integers of their width: torch does not copy values of each dtype."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers.get(values.itemsize, values.dtype))


def state(number: int) -> dict[str, LogicalTensor]:
    """A small job's tensors, all of them filled with `number`."""
    return {
        "weight": whole(torch.full((64, 33), float(number))),
        "moment": in_boxes(torch.full((9, 4), float(number)), [Box((0, 0), (4, 4)), Box((4, 0), (5, 4))]),
        "count": whole(torch.tensor(number)),
    }


def save_state(folder: Path, step: int, number: int | None = None, **options: Any) -> Path:
    """Save `state(number)`, by default that of the step's number, with the number in plain data of both kinds."""
    number = step if number is None else number
    seed = {"number": number, "of_rank": torch.full((3,), number)}
    return save(folder, step, state(number), {"number": number, "shared": torch.tensor([number])}, seed, **options)


def saved_number(folder: Path, step: int | None = None) -> int:
    """The number of a checkpoint of `state`, which is that of everything in it."""
    with Checkpoint.open(folder, step) as checkpoint:
        found = {value.item() for name in checkpoint.names for value in checkpoint.read(name).unique()}
        assert checkpoint.names.keys() == {"weight", "moment", "count"}
        own = checkpoint.by_rank(0)
        found |= {checkpoint.plain["number"], checkpoint.plain["shared"].item(), own["number"]}
        found |= set(own["of_rank"].tolist())
    (number,) = found
    return int(number)
