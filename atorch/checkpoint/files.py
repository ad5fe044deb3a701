"""Checkpoints on disk: `save` writes one, `Checkpoint` reads one, on any number of ranks and in any other boxes."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.checkpoint import commit
from atorch.checkpoint.boxes import Box, LogicalTensor, check_cover, intersection, whole_box
from atorch.checkpoint.commit import steps
from atorch.checkpoint.manifest import Manifest, Saved, read_manifest
from atorch.checkpoint.plain_data import decoded, encoded
from atorch.checkpoint.shard_file import DTYPES, MappedShard, check_name, copy_values, dtype_name, empty, write_shard
from atorch.distributed.collectives import (
    all_or_none,
    call_on_all_ranks,
    from_rank_zero,
    gather_objects,
    is_distributed,
)
from atorch.distributed.fingerprints import described
from atorch.errors import CheckpointError, near_miss, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Checkpoint", "save", "steps"]

_Key = tuple[str, Box]
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

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks: a value cannot be saved, a tensor has holes or overlapping boxes, ranks differ
            about a tensor, or the disk refuses.
        ArgumentError: ranks were given other steps or folders.
    """
    rank = dist.get_rank() if is_distributed() else 0
    base = Path(folder)

    def checked() -> tuple[dict[str, LogicalTensor], list[_Listed], Any, Any]:
        _check_numbers(step, keep_last, keep_every)
        of_data: dict[str, Tensor] = {}
        of_rank: dict[str, Tensor] = {}
        plain_json = encoded(dict(plain), "plain", "$plain.", of_data)
        rank_json = encoded(dict(by_rank or {}), "by_rank", f"$rank{rank}.", of_rank)
        for name in tensors:
            if check_name(name).startswith("$"):
                raise CheckpointError(
                    f"{name!r} is no name of a tensor here: `$` begins those of tensors in plain data"
                )
        everything = {**tensors, **_whole(of_rank), **(_whole(of_data) if rank == 0 else {})}
        return everything, _listed(everything), plain_json, rank_json

    given = {"step": step, "folder": os.fspath(folder), "keep_last": keep_last, "keep_every": keep_every}
    facts = {name: described(name, value) for name, value in given.items()}
    local, own, plain_json, rank_json = call_on_all_ranks("save", lambda: facts, checked)
    listed = gather_objects(own)
    owned = _owned(listed, rank)
    part = from_rank_zero(all_or_none(lambda: commit.begin(base, step) if rank == 0 else None))
    assert part is not None, "rank 0 has made it"

    def written() -> Any:
        pieces = [
            (name, dtype_name(name, tensor.dtype), box, values)
            for name, tensor in local.items()
            for box, values in {box: values for box, values in tensor.pieces if (name, box) in owned}.items()
        ]
        if not part.is_dir():
            raise CheckpointError(f"{base} of rank {rank} is not that of rank 0; give a folder that all ranks share")
        return write_shard(part / f"rank-{rank:05}.safetensors", pieces) if pieces else None

    def published() -> Path | None:
        if rank != 0:
            return None
        saved = {name: Saved(shape, dtype) for items in listed for name, shape, dtype, _ in items}
        shards = [shard for shard, _ in entries if shard is not None]
        manifest = Manifest(step, len(entries), saved, shards, plain_json, [of_rank for _, of_rank in entries])
        return commit.publish(part, manifest, keep_last, keep_every)

    try:
        entries = gather_objects((all_or_none(written), rank_json))
        path = from_rank_zero(all_or_none(published))
    except Exception:
        if rank == 0:
            commit.discard(part)
        raise
    assert path is not None, "rank 0 has published it"
    return path


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
        _check_pieces(name, tensor)
        for box, values in tensor.pieces:
            if values.layout != torch.strided or values.is_meta:
                raise CheckpointError(f"{name!r} {box} has no values of its own in memory; save a dense tensor")
        boxes = [(box.offsets, box.sizes) for box, _ in tensor.pieces if box.numel]
        listed.append((name, tuple(tensor.shape), dtype_name(name, tensor.dtype), boxes))
    return listed


def _check_pieces(name: str, tensor: LogicalTensor) -> None:
    for box, values in tensor.pieces:
        if not box.fits(tensor.shape) or tuple(values.shape) != tuple(box.sizes):
            raise CheckpointError(
                f"{name!r}: values of shape {tuple(values.shape)} for its box {box} of {tuple(tensor.shape)}; a box "
                "lies within the tensor, and its values have its sizes"
            )


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


class Checkpoint:
    """A complete checkpoint, open to be read.

    Attributes:
        step: the step of its save.
        world_size: the number of ranks that saved it.
        names: shape and dtype of each tensor.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.step, self.world_size = path, manifest.step, manifest.world_size
        self.names: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (saved.shape, DTYPES[saved.dtype])
            for name, saved in manifest.tensors.items()
            if not name.startswith("$")
        }
        self._manifest = manifest
        self._places: dict[str, list[tuple[Box, int, int]]] = {name: [] for name in manifest.tensors}
        for number, shard in enumerate(manifest.shards):
            for index, stored in enumerate(shard.stored):
                self._places[stored.tensor].append((stored.box, number, index))
        self._maps: dict[int, MappedShard] = {}

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
                checkpoint._mapped(number)
            return checkpoint

        return all_or_none(opened)

    def load(self, tensors: Mapping[str, LogicalTensor]) -> None:
        """Fill the pieces of `tensors`, cast to their dtypes. All ranks call it together, each with what it has.

        Raises:
            CheckpointError: on all ranks: a tensor is not here or has another shape, or a file has changed since.
        """
        all_or_none(lambda: self._load(tensors))

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU. A rank may call it alone.

        Raises:
            CheckpointError: as `load`.
        """
        saved = self._saved(name)
        tensor = empty(saved.shape, DTYPES[saved.dtype])
        self._load({name: LogicalTensor(saved.shape, tensor.dtype, [(whole_box(saved.shape), tensor)])})
        return tensor

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
        """Let go of the files; a later read opens them again."""
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, tensors: Mapping[str, LogicalTensor]) -> None:
        for name, tensor in tensors.items():
            saved = self._saved(name)
            if saved.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{name!r} has the shape {saved.shape} in {self.path}, and {tuple(tensor.shape)} here; load it "
                    "into the model that it was saved from"
                )
            _check_pieces(name, tensor)
            for box, values in tensor.pieces:
                for place, number, index in self._places[name]:
                    common = intersection(box, place)
                    if common is not None:
                        source = self._mapped(number).read(index, common)
                        copy_values(values.detach()[common.slices(box)], source)

    def _saved(self, name: str) -> Saved:
        saved = self._manifest.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{name!r} is not in {self.path}; {near_miss(name, self.names)}")
        return saved

    def _mapped(self, number: int) -> MappedShard:
        if number not in self._maps:
            shard = self._manifest.shards[number]
            dtypes = {stored.tensor: self._manifest.tensors[stored.tensor].dtype for stored in shard.stored}
            self._maps[number] = MappedShard(self.path / shard.name, shard, dtypes)
        return self._maps[number]

    def _decoded(self, value: Any) -> dict[str, Any]:
        try:
            data = decoded(value, functools.cache(self.read))  # one tensor, however often it is named
        except RecursionError:
            data = None
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.path}: its plain data is no dict, or is too deep; load another checkpoint")
        return data
