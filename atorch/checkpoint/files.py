"""Checkpoints written: `save` lets each rank write its boxes, each box once, and publishes them together."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.checkpoint import commit
from atorch.checkpoint.boxes import Box, LogicalTensor, check_cover, check_pieces, whole_box
from atorch.checkpoint.manifest import Manifest, Saved, encoded
from atorch.checkpoint.shard_file import (
    DTYPES,
    Shard,
    Stored,
    check_name,
    copy_values,
    dtype_name,
    reporting,
    write_shard,
)
from atorch.distributed.collectives import all_or_none, call_on_all_ranks, gather_objects, is_distributed
from atorch.distributed.fingerprints import facts_of
from atorch.distributed.world import TIMEOUT
from atorch.errors import CheckpointError, shown
from atorch.files import FileKind
from atorch.files import write as write_file
from atorch.logs import OF_THIS_RANK, logger

_Key = tuple[str, Box]
_Piece = tuple[str, str, Box, Tensor]  # the tensor's name, that of its dtype, box, values
_NOTE = FileKind("note", CheckpointError)
_SHARE = 0.02  # of a core, for the thread that writes in the background
_PATIENCE_AT_END = timedelta(minutes=1)  # with ranks that write nothing, once this process has nothing else to do
_Listed = tuple[str, tuple[int, ...], str, list[tuple[tuple[int, ...], tuple[int, ...]]]]


def save(
    folder: str | os.PathLike[str],
    step: int,
    tensors: Mapping[str, LogicalTensor],
    plain: Mapping[str, Any],
    by_rank: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    background: BackgroundWriter | None = None,
) -> Path:
    """Write the checkpoint of `step` into a folder that all ranks share. All ranks call it together.

    Until the call is done, the folder's earlier checkpoints stand; so does an earlier one of the same step.

    Args:
        folder: made if it is missing.
        step: from 0.
        tensors: by name, in any division among the ranks; a rank need not have each.
        plain: numbers, texts, lists, tuples, dicts with keys of these, None and tensors, equal on all ranks.
        by_rank: the same kinds of data, which may differ by rank.
        keep_last: removes all checkpoints but the highest so many, and this one.
        keep_every: keeps those of its multiples, too.
        background: writes copies of the values after the call; its `wait` raises what fails then.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks: a value cannot be saved, a tensor has holes or overlapping boxes, ranks differ
            about a tensor, or the disk refuses.
        ArgumentError: ranks were given other steps or folders.
    """
    rank = dist.get_rank() if is_distributed() else 0
    base, made = Path(folder), list[Path]()

    def checked() -> tuple[dict[str, LogicalTensor], list[_Listed], Any, Any]:
        _check_numbers(step, keep_last, keep_every)
        of_data: dict[str, Tensor] = {}
        of_rank: dict[str, Tensor] = {}
        plain_json = encoded(dict(plain), "plain", "$plain.", of_data)
        rank_json = encoded(dict(by_rank or {}), "by_rank", f"$rank{rank}.", of_rank)
        for name in tensors:
            if check_name(name).startswith("$"):
                raise CheckpointError(f"{name!r} cannot name a tensor: `$` begins the names of tensors in plain data")
        everything = {**tensors, **_whole(of_rank), **(_whole(of_data) if rank == 0 else {})}
        listed = _listed(everything)
        if rank == 0:
            made.append(commit.begin(base, step))
        return everything, listed, plain_json, rank_json

    given = {"step": step, "folder": os.fspath(folder), "keep_last": keep_last, "keep_every": keep_every}
    facts = {name: facts_of(name, value) for name, value in given.items()}
    try:
        local, own, plain_json, rank_json = call_on_all_ranks("save", lambda: facts, checked)
        ranks = gather_objects((own, rank_json, made))
        listed = [of_rank for of_rank, *_ in ranks]
        owned = _owned(listed, rank)
        # By box, since a process may hold one box twice.
        boxes = {(name, box): values for name, tensor in local.items() for box, values in tensor.pieces}
        pieces = [
            (name, dtype_name(name, local[name].dtype), box, values)
            for (name, box), values in boxes.items()
            if (name, box) in owned
        ]
        saved = {name: Saved(shape, dtype) for items in listed for name, shape, dtype, _ in items}
        by_ranks = [of_rank for _, of_rank, _ in ranks]
        part = _Part(ranks[0][2][0], rank, step, saved, plain_json, by_ranks, (keep_last, keep_every))

        def ready() -> list[_Piece]:
            part.need_folder()
            return pieces if background is None else background.copied(pieces)

        if background is not None:
            copies = all_or_none(ready)
            background.start(lambda: part.write_alone(copies, background.pause))
        else:
            shards = gather_objects(all_or_none(lambda: part.write(ready())))
            all_or_none(lambda: part.publish(shards) if rank == 0 else None)
    except Exception:
        for part_folder in made:
            commit.discard(part_folder)
        raise
    return base / commit.name_of(step)


@dataclass(frozen=True)
class _Part:
    """A checkpoint that is being written, and what its manifest says of more than its files."""

    folder: Path
    rank: int
    step: int
    tensors: Mapping[str, Saved]
    plain: Any
    by_rank: list[Any]
    kept: tuple[int | None, int | None]

    def write(self, pieces: list[_Piece], pause: Callable[[], object] | None = None) -> Shard | None:
        return write_shard(self.folder / f"rank-{self.rank:05}.safetensors", pieces, pause) if pieces else None

    def need_folder(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} was removed while it was written, as another save into {self.folder.parent} does, or a "
                f"rank that cannot write, or rank {self.rank} does not share it; give each result a folder of its own, "
                "which all ranks share, and one job at a time"
            )

    def publish(self, shards: list[Shard | None]) -> Path:
        self.need_folder()
        files = [shard for shard in shards if shard is not None]
        manifest = Manifest(self.step, len(self.by_rank), self.tensors, files, self.plain, self.by_rank)
        return commit.publish(self.folder, manifest, *self.kept)

    def write_alone(self, pieces: list[_Piece], pause: Callable[[], object]) -> None:
        """Write and publish without exchanges between processes, which may be training: ranks leave notes instead."""
        shard, failure = None, None
        try:
            shard = self.write(pieces, pause)
        except CheckpointError as error:
            failure = error
        try:
            self.need_folder()
            if self.rank != 0:
                try:
                    write_file(self._note(self.rank), json.dumps([failure and str(failure), shard]), _NOTE)
                except CheckpointError:  # a full disk: without the folder, rank 0 waits no longer
                    with suppress(OSError):  # it may be published: the note may be there in spite of the error
                        commit.remove(self.folder, self.step)
                    raise
            if failure is not None:
                raise failure
            if self.rank == 0:
                self.publish([shard, *(self._written_by(rank, pause) for rank in range(1, len(self.by_rank)))])
        finally:
            if self.rank == 0:  # it is not there any more, if it was published
                commit.discard(self.folder)

    def _note(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05}.json"

    def _written_by(self, rank: int, pause: Callable[[], object]) -> Shard | None:
        """The file of another rank, once it has written it."""
        note, written, began = self._note(rank), 0, 0.0
        while not note.exists():
            self.need_folder()
            with reporting(f"{self.folder} cannot be read"):
                now = sum(os.stat(file).st_size for file in self.folder.glob("*.safetensors"))
            patience = TIMEOUT if threading.main_thread().is_alive() else _PATIENCE_AT_END
            if now != written or not began:
                written, began = now, time.monotonic()
            elif time.monotonic() > began + patience.total_seconds():
                raise CheckpointError(f"rank {rank} has written nothing for {patience}; look there for what happened")
            time.sleep(0.02)
            pause()
        with reporting(f"{note} cannot be removed"):
            told, shard = json.loads(note.read_bytes())
            note.unlink()
        if told:
            raise CheckpointError(f"rank {rank} failed: {told}")
        if shard is None:
            return None
        name, num_bytes, stored = shard
        return Shard(name, num_bytes, [Stored(tensor, Box(*map(tuple, box)), sums) for tensor, box, sums in stored])


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, from copies in host memory that it keeps for the next one.

    The thread takes little time until somebody waits for it. A lower priority would be worse: such a thread keeps the
    interpreter's lock while it waits for a core. The process waits at its end until the last checkpoint is written.
    """

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_awaited = threading.Event()
        self._is_given_up = False
        self._used = 0.0

    def has_ended(self, within_s: float) -> bool:
        """True if nothing is being written, after a wait of at most so many seconds."""
        self._is_awaited.set()
        return self._future is None or bool(wait_for([self._future], within_s).done)

    def give_up(self) -> None:
        """End the thread soon: a process has ended, for whose file it would wait."""
        self._is_given_up = True

    def wait(self) -> None:
        """Wait on this rank until the last checkpoint is written.

        Raises:
            CheckpointError: it could not be written; raised once.
        """
        future, self._future = self._future, None
        if future is not None:
            self._is_awaited.set()
            future.result()

    def pause(self) -> None:
        """Leave the processor to others for most of the time, unless somebody waits.

        Raises:
            CheckpointError: `give_up` was called.
        """
        if self._is_given_up:
            raise CheckpointError("another process has ended before it was complete")
        now = time.thread_time()
        if threading.main_thread().is_alive():
            self._is_awaited.wait((now - self._used) * (1 / _SHARE - 1))
        self._used = now

    def copied(self, pieces: list[_Piece]) -> list[_Piece]:
        """`pieces` with copies of their values, page-locked if these are on a CUDA device."""
        pieces = sorted(pieces, key=lambda piece: -DTYPES[piece[1]].itemsize)  # each is aligned
        ends = list(accumulate((box.numel * DTYPES[dtype].itemsize for _, dtype, box, _ in pieces), initial=0))
        if len(self._memory) < ends[-1]:
            is_pinned = any(values.is_cuda for *_, values in pieces)
            self._memory = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=is_pinned)
        copies = []
        for (name, dtype, box, values), (start, stop) in zip(pieces, pairwise(ends), strict=True):
            copy = self._memory[start:stop].view(DTYPES[dtype]).view(box.sizes)
            copy_values(copy, values.detach())
            copies.append((name, dtype, box, copy))
        return copies

    def start(self, work: Callable[[], None]) -> None:
        """Begin to write; `wait` has been called since the last time."""
        self._future = future = Future[None]()
        future.add_done_callback(_log_failure)
        self._is_awaited.clear()

        def run() -> None:
            self._used = time.thread_time()
            try:
                work()
            except BaseException as error:  # nobody may wait without end
                future.set_exception(error)
            else:
                future.set_result(None)

        # That of an executor would be waited for while the main thread still counts as alive.
        threading.Thread(target=run, name="checkpoint").start()


def _log_failure(future: Future[None]) -> None:
    if (error := future.exception()) is not None:  # the process may end before anybody asks
        logger.error("a checkpoint was not saved in the background: %s", error, extra=OF_THIS_RANK)


def _check_numbers(step: int, keep_last: int | None, keep_every: int | None) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise CheckpointError(f"step is {shown(step)}; it is an integer from 0")
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and (type(number) is not int or number < 1):
            raise CheckpointError(f"{name} is {shown(number)}; it is an integer from 1, or None")


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, LogicalTensor]:
    return {
        name: LogicalTensor(tuple(tensor.shape), tensor.dtype, [(whole_box(tensor.shape), tensor)])
        for name, tensor in tensors.items()
    }


def _listed(tensors: Mapping[str, LogicalTensor]) -> list[_Listed]:
    """Name, shape, dtype and boxes of each tensor on this rank, as other ranks read them."""
    listed: list[_Listed] = []
    for name, tensor in tensors.items():
        check_pieces(name, tensor)
        for box, values in tensor.pieces:
            if values.layout != torch.strided or values.is_meta:
                raise CheckpointError(f"{name!r} {box} has no values of its own in memory; save a dense tensor")
        boxes = [(box.offsets, box.sizes) for box, _ in tensor.pieces if box.numel]
        listed.append((name, tuple(tensor.shape), dtype_name(name, tensor.dtype), boxes))
    return listed


def _owned(listed: Sequence[list[_Listed]], rank: int) -> set[_Key]:
    """The boxes that `rank` writes: of each that several ranks hold, the least loaded one. Equal on all ranks.

    Raises:
        CheckpointError: ranks differ about a tensor, or its boxes do not cover it.
    """
    saved: dict[str, tuple[int, tuple[int, ...], str]] = {}
    holders: defaultdict[str, defaultdict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for holder, items in enumerate(listed):
        for name, shape, dtype, boxes in items:
            first, *known = saved.setdefault(name, (holder, shape, dtype))
            if known != [shape, dtype]:
                raise CheckpointError(
                    f"{name!r} is {known[1]} {known[0]} on rank {first} and {dtype} {shape} on rank {holder}; save one "
                    "tensor under one name"
                )
            for box in {Box(*box) for box in boxes}:
                holders[name][box].append(holder)
    for name, (_, shape, _) in saved.items():
        check_cover(name, shape, list(holders[name]))
    sized = [
        (len(ranks) > 1, -box.numel * DTYPES[saved[name][2]].itemsize, name, box, ranks)
        for name, boxes in holders.items()
        for box, ranks in boxes.items()
    ]
    loads = [0] * len(listed)
    owned: set[_Key] = set()
    for _, size, name, box, ranks in sorted(sized):
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] -= size
        if writer == rank:
            owned.add((name, box))
    return owned
