"""Folders of torch.distributed.checkpoint (DCP) converted into checkpoints, and checkpoints read by `dcp.load`."""

from __future__ import annotations

import io
import operator
import os
import pickle
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from atorch.checkpoint import commit
from atorch.checkpoint.boxes import Box, LogicalTensor, check_cover
from atorch.checkpoint.manifest import Manifest, Saved, saved_tensor
from atorch.checkpoint.pretrained import MODEL
from atorch.checkpoint.reading import Checkpoint
from atorch.checkpoint.shard_file import DTYPES, check_name, dtype_name, open_regular, reporting, write_shard
from atorch.errors import CheckpointError, shown
from atorch.files import AnyPath
from atorch.files.weights import UNREADABLE
from atorch.units import MiB

_DCP = "torch.distributed.checkpoint"
# All that a .metadata refers to. An exact list, since a pickle may name any function, and call it.
_OF_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_NAMES = frozenset(
    {
        *((f"{_DCP}.metadata", name) for name in _OF_METADATA),
        *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES.values()),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
    }
)
_MAX_METADATA = 256 * MiB
_PICKLED = MiB  # that a tensor's entry may have beside its values


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise CheckpointError(f"it names {module}.{name}, which is no part of DCP's metadata")
        return super().find_class(module, name)


def convert_dcp(folder: AnyPath, target: AnyPath) -> Path:
    """Write the tensors of a DCP folder as the checkpoint of step 0 in `target`, on one process.

    A box at a time is in memory. Values other than tensors are left out: the checkpoint is for `load_pretrained`,
    `export` and `Checkpoint.read`. If not all names begin with `model.` or `optim`, they are those of a model.

    Raises:
        CheckpointError: it is no DCP folder, is damaged, or refers to code.
    """
    source, path = Path(folder), Path(folder) / ".metadata"
    try:
        tensors, entries = _listed(_read_metadata(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not read: {error}") from None
    except (*UNREADABLE, MemoryError) as error:
        raise CheckpointError(f"{path} is no metadata of DCP: {type(error).__name__}: {error}") from None
    prefix = "" if all(name.startswith((MODEL, "optim")) for name in tensors) else MODEL
    pieces = [
        (prefix + name, tensors[name].dtype, box, partial(_read_tensor, source, name, box, info))
        for name, box, info in entries
        if box.numel
    ]
    part = commit.begin(Path(target), 0)
    try:
        shard = write_shard(part / "rank-00000.safetensors", pieces)
        named = {prefix + name: saved for name, saved in tensors.items()}
        return commit.publish(part, Manifest(0, 1, named, [shard], {"aliases": {}}, [{}]), None, None)
    finally:
        commit.discard(part)


def _read_metadata(path: Path) -> Metadata:
    handle, num_bytes = open_regular(path)
    with open(handle, "rb") as file, reporting(f"{path} cannot be read"):
        data = file.read(_MAX_METADATA)
    metadata = _Unpickler(io.BytesIO(data)).load() if num_bytes <= _MAX_METADATA else None
    if not isinstance(metadata, Metadata):
        raise CheckpointError("it holds something else than DCP's metadata")
    return metadata


def _listed(metadata: Metadata) -> tuple[dict[str, Saved], list[tuple[str, Box, Any]]]:
    """The tensors, and their boxes with the places of these in files. Any field may have any type."""
    tensors: dict[str, Saved] = {}
    entries = []
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        form = metadata.state_dict_metadata.get(index.fqn)
        if isinstance(form, TensorStorageMetadata):
            name = check_name(index.fqn)
            tensors[name] = saved_tensor(name, [list(form.size), dtype_name(name, form.properties.dtype)])
            sizes: Any = next((chunk.sizes for chunk in form.chunks if chunk.offsets == index.offset), None)
            box = Box(*(tuple(map(operator.index, numbers)) for numbers in (index.offset, sizes)))
            if not box.fits(tensors[name].shape):
                raise CheckpointError(f"the box {box} of {name!r} is no part of it")
            boxes[name].append(box)
            entries.append((name, box, info))
    for name, saved in tensors.items():
        check_cover(name, saved.shape, boxes[name])
    return tensors, entries


def _read_tensor(folder: Path, name: str, box: Box, info: Any) -> Tensor:
    place: list[Any] = [getattr(info, key, None) for key in ("relative_path", "offset", "length")]
    file_name, start, length = place
    is_plain = isinstance(file_name, str) and os.path.basename(file_name) == file_name
    if not is_plain or getattr(info, "transform_descriptors", None) or not type(start) is type(length) is int:
        raise CheckpointError(f"{folder}: {name!r} is in {shown(file_name)} in a form that is not read")
    handle, num_bytes = open_regular(folder / file_name)
    with open(handle, "rb") as file, reporting(f"{folder / file_name} cannot be read"):
        if not 0 <= start <= start + length <= num_bytes:
            raise CheckpointError(f"{folder / file_name} is cut short; copy it again")
        file.seek(start)
        data = file.read(length)
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise CheckpointError(f"{folder / file_name} holds no tensor for {name!r}: {error}") from error
    if not isinstance(values, Tensor) or tuple(values.shape) != box.sizes:
        raise CheckpointError(f"{folder / file_name} holds something else than {name!r} {box}; copy it again")
    return values


class CheckpointReader(FileSystemReader):
    """Lets `torch.distributed.checkpoint.load` read the tensors of a checkpoint: `model.N`, and `optim.state.N.key`.

    All processes make it together. `folder`, `step`: as in `Checkpoint.open`.
    """

    def __init__(self, folder: AnyPath, step: int | None = None) -> None:
        self._checkpoint = Checkpoint.open(folder, step)
        super().__init__(self._checkpoint.path)
        own = self._checkpoint.names
        self._names = {f"optim.state.{name[6:]}" if name.startswith("optim.") else name: name for name in own}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        forms: dict[str, Any] = {}
        for shown_name, name in self._names.items():
            shape, dtype = self._checkpoint.names[name]
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
            forms[shown_name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [chunk])
        places = {MetadataIndex(name, [0] * len(form.size)): None for name, form in forms.items()}
        return Metadata(forms, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name = self._names[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            shape = self._checkpoint.names[name][0]
            self._checkpoint.load_alone({name: LogicalTensor(shape, target.dtype, [(box, target)])})
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
