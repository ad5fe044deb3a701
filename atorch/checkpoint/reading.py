"""Checkpoints read: on any number of ranks, in any boxes, block by block. Memory holds a few blocks at a time."""

from __future__ import annotations

import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.checkpoint import commit
from atorch.checkpoint.boxes import Box, LogicalTensor, check_pieces, intersection, whole_box
from atorch.checkpoint.manifest import Manifest, Saved, decoded, read_manifest
from atorch.checkpoint.shard_file import DTYPES, ShardReader, block_bytes, empty, scatter, staging, touched
from atorch.distributed.barrier_diagnostics import answered
from atorch.distributed.collectives import (
    all_or_none,
    from_rank_zero,
    gather_objects,
    is_distributed,
    is_fake_world,
    present_group,
)
from atorch.errors import CheckpointError, near_miss

if TYPE_CHECKING:
    from typing_extensions import Self

_Block = tuple[int, int, int]  # the numbers of a file, of a piece in it, and of a block of that
_Needs = dict[_Block, list[tuple[Box, Tensor]]]  # boxes of its tensor that have parts of the block, with their values
_THREADS = 4  # read and verify
_MAX_OPEN = 64  # files
_MAX_SENT = 8  # blocks that ranks exchange at a time


class Checkpoint:
    """A complete checkpoint, open to be read.

    Attributes:
        step: the step of its save.
        world_size: the number of ranks that saved it.
        names: shape and dtype of each tensor.
    """

    def __init__(self, path: Path, manifest: Manifest, starts: Mapping[int, bytes] | None = None) -> None:
        """`starts`: of files that `save` did not write, by number, the bytes before their data."""
        self.path, self.step, self.world_size = path, manifest.step, manifest.world_size
        self.names: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (saved.shape, DTYPES[saved.dtype])
            for name, saved in manifest.tensors.items()
            if starts or not name.startswith("$")  # of plain data
        }
        self._manifest, self._starts = manifest, starts or {}
        self._places: dict[str, list[tuple[Box, int, int]]] = {name: [] for name in manifest.tensors}
        for number, shard in enumerate(manifest.shards):
            for index, stored in enumerate(shard.stored):
                self._places[stored.tensor].append((stored.box, number, index))
        self._readers: dict[int, ShardReader] = {}

    @classmethod
    def open(cls, folder: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
        """Open the checkpoint of `step`, by default the newest complete one. All ranks call it together.

        Raises:
            CheckpointError: on all ranks: there is none, or its manifest or one of its files is not as it was written.
        """
        rank = dist.get_rank() if is_distributed() else 0
        found = from_rank_zero(all_or_none(lambda: commit.path_of(Path(folder), step) if rank == 0 else None))
        assert found is not None, "rank 0 has looked"

        def opened() -> Checkpoint:
            checkpoint = cls(found[1], read_manifest(found[1], found[0]))
            for number in range(len(checkpoint._manifest.shards)) if rank == 0 else ():
                checkpoint._reader(number)
            return checkpoint

        return all_or_none(opened)

    def load(self, tensors: Mapping[str, LogicalTensor]) -> None:
        """Fill the pieces of `tensors`, cast to their dtypes. All ranks call it together, each with what it has.

        Blocks that more than two ranks need are read by one of them, which sends them to the others.

        Raises:
            CheckpointError: on all ranks: a tensor is not here or has another shape, or a file has changed since.
        """
        needs = all_or_none(lambda: self._needs(tensors))
        failure = self._exchange(needs) if is_distributed() and not is_fake_world() else None

        def filled() -> None:
            if failure is not None:
                raise failure
            self._fill(needs)

        all_or_none(filled)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU. A rank may call it alone.

        Raises:
            CheckpointError: as `load`.
        """
        saved = self._saved(name)
        tensor = empty(saved.shape, DTYPES[saved.dtype])
        self.load_alone({name: LogicalTensor(saved.shape, tensor.dtype, [(whole_box(saved.shape), tensor)])})
        return tensor

    def load_alone(self, tensors: Mapping[str, LogicalTensor]) -> None:
        """As `load`, on this rank alone."""
        self._fill(self._needs(tensors))

    @functools.cached_property
    def plain(self) -> dict[str, Any]:
        """The plain data that all ranks share. A rank may read it alone.

        Raises:
            CheckpointError: it is no plain data, or a file has changed since it was written.
        """
        return self._decoded(self._manifest.plain)

    def by_rank(self, rank: int) -> dict[str, Any]:
        """The plain data of a rank of the save. A rank may call it alone.

        Raises:
            CheckpointError: as `plain`; or there was no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise CheckpointError(f"{self.path} has no rank {rank}: it was saved by {self.world_size}")
        return self._decoded(self._manifest.by_rank[rank])

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _needs(self, tensors: Mapping[str, LogicalTensor]) -> _Needs:
        """The blocks that have parts of `tensors` on this rank."""
        needs: _Needs = {}
        for name, tensor in tensors.items():
            saved = self._saved(name)
            if saved.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{name!r} has the shape {saved.shape} in {self.path}, and {tuple(tensor.shape)} here; load it "
                    "into the model that it was saved from"
                )
            check_pieces(name, tensor)
            for (box, values), (place, number, index) in itertools.product(tensor.pieces, self._places[name]):
                common = intersection(box, place)
                if common is not None:
                    within = Box(tuple(one.start for one in common.slices(place)), common.sizes)
                    for block in dict.fromkeys(touched(place.sizes, within, DTYPES[saved.dtype].itemsize)):
                        needs.setdefault((number, index, block), []).append((box, values.detach()))
        return needs

    def _fill(self, needs: _Needs) -> None:
        """Read blocks in threads, each into one of few buffers, and copy what is needed of them."""
        buffers: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(min(_THREADS, len(needs))):
            buffers.put(staging())

        def work(key: _Block) -> None:
            buffer = buffers.get()
            try:
                self._reader(key[0]).read(key[1], key[2], buffer)
                scatter(*self._piece(key), key[2], buffer, needs[key])
            finally:
                buffers.put(buffer)

        with ThreadPoolExecutor(_THREADS) as threads:
            for number, keys in itertools.groupby(sorted(needs), lambda key: key[0]):
                self._reader(number)  # no thread opens a file, which may close another
                for _ in (threads.map if len(needs) > _THREADS else map)(work, list(keys)):
                    pass

    def _exchange(self, needs: _Needs) -> CheckpointError | None:
        """Fill from the blocks that more than two ranks need, and remove these from `needs`; the error of this rank.

        Each is read by one of the ranks. All send at a time, and none waits for one that has failed.
        """
        rank, failure = dist.get_rank(), None
        holders: defaultdict[_Block, list[int]] = defaultdict(list)
        if dist.get_world_size() > 2:
            for holder, keys in enumerate(gather_objects(list(needs))):
                for key in keys:
                    holders[key].append(holder)
        shared = sorted((ranks, key) for key, ranks in holders.items() if len(ranks) > 2 and rank in ranks)
        for ranks, group in itertools.groupby(shared, lambda item: item[0]):
            keys = [key for _, key in group]
            buffers = [staging() for _ in range(min(len(ranks), len(keys), _MAX_SENT))]
            for start in range(0, len(keys), len(buffers)):
                works, received = [], []
                for place, (key, buffer) in enumerate(zip(keys[start:], buffers, strict=False)):
                    owner = ranks[(start + place) % len(ranks)]
                    sent = buffer[: block_bytes(*self._piece(key), key[2]) + 1]  # its last byte: the others are right
                    if owner == rank:
                        sent[-1] = 0
                        try:
                            self._reader(key[0]).read(key[1], key[2], buffer)
                            sent[-1] = 1
                        except CheckpointError as error:
                            failure = failure or error
                        works += [dist.isend(sent, other) for other in ranks if other != rank]
                    else:
                        works.append(dist.irecv(sent, owner))
                    received.append((key, sent))
                answered(lambda works=works: [work.wait() for work in works], present_group())  # type: ignore[misc]
                for key, sent in received:
                    targets = needs.pop(key)
                    if sent[-1]:
                        scatter(*self._piece(key), key[2], sent, targets)
        return failure

    def _piece(self, key: _Block) -> tuple[Box, torch.dtype]:
        stored = self._manifest.shards[key[0]].stored[key[1]]
        return stored.box, DTYPES[self._manifest.tensors[stored.tensor].dtype]

    def _saved(self, name: str) -> Saved:
        saved = self._manifest.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{name!r} is not in {self.path}; {near_miss(name, self.names)}")
        return saved

    def _reader(self, number: int) -> ShardReader:
        if number not in self._readers:
            if len(self._readers) >= _MAX_OPEN:
                self._readers.pop(next(iter(self._readers))).close()
            shard = self._manifest.shards[number]
            dtypes = {stored.tensor: self._manifest.tensors[stored.tensor].dtype for stored in shard.stored}
            self._readers[number] = ShardReader(self.path / shard.name, shard, dtypes, self._starts.get(number))
        return self._readers[number]

    def _decoded(self, value: Any) -> dict[str, Any]:
        try:
            data = decoded(value, functools.cache(self.read))  # one tensor, however often it is named
        except RecursionError:
            data = None
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.path}: its plain data is no dict, or is too deep; load another checkpoint")
        return data
