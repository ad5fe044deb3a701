"""Folders of torch.distributed.checkpoint (DCP) read as sources of checkpoints, and checkpoints read by `dcp.load`."""

from __future__ import annotations

import io
import operator
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
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
from atorch.checkpoint.manifest import Manifest, Saved, encoded, saved_tensor
from atorch.checkpoint.pretrained import MODEL
from atorch.checkpoint.reading import Checkpoint
from atorch.checkpoint.shard_file import DTYPES, check_name, dtype_name, open_regular, reporting, write_shard
from atorch.errors import CheckpointError, shown
from atorch.files import AnyPath
from atorch.files.strict_json import Format, check
from atorch.files.weights import UNREADABLE, check_archive, check_pickle
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
_OPTIM = ("optim", "optimizer")
_GROUPS = tuple((kind, "param_groups") for kind in _OPTIM)
_SETTINGS = Format("group of parameters", CheckpointError, max_values=1000, allows_infinity=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise CheckpointError(f"it names {module}.{name}, which is no part of DCP's metadata")
        return super().find_class(module, name)


class ForeignCheckpoint:
    """The content of another program's folder for a checkpoint, and the names of what is left out."""

    def __init__(self) -> None:
        self.step = 0
        self.aliases: dict[str, str] = {}
        self.optim: dict[str, Any] = {"class": None, "groups": [], "values": {}}  # without a group, there is none
        self.more: dict[str, Any] = {}  # plain data by name
        self.left_out: list[str] = []
        self.tensors: dict[str, Saved] = {}
        self._pieces: list[tuple[str, str, Box, Tensor | Callable[[], Tensor]]] = []

    def add(
        self, name: str, shape: Any, dtype: str, pieces: Iterable[tuple[Box, Tensor | Callable[[], Tensor]]]
    ) -> None:
        """Add a tensor: boxes, with their values or functions that read these.

        Raises:
            CheckpointError: it is there already, or the boxes do not cover it.
        """
        if check_name(name).startswith("$") or name in self.tensors:
            raise CheckpointError(f"{shown(name)} is there twice, or no name of a tensor")
        saved, pieces = saved_tensor(name, [list(map(operator.index, shape)), dtype]), list(pieces)
        if wrong := next((box for box, _ in pieces if not box.fits(saved.shape)), None):
            raise CheckpointError(f"the box {wrong} of {name!r} is no part of it")
        check_cover(name, saved.shape, [box for box, _ in pieces])
        self.tensors[name] = saved
        self._pieces += [(name, dtype, box, values) for box, values in pieces if box.numel]

    def write(self, folder: Path) -> Path:
        """Write the checkpoint of this step into a folder, on one process; a box at a time is in memory."""
        if not 0 <= self.step < 10**18:
            raise CheckpointError(f"it is of step {self.step}, which is none")
        if not self.tensors:
            raise CheckpointError("it has no tensors of a model; give what holds them")
        plain: dict[str, Any] = {"aliases": self.aliases, **self.more}
        if self.optim["groups"]:
            plain |= {"mesh": [], "extra": {}, "optim": self.optim}
        data = encoded(plain, "plain", "$plain.", {})
        part = commit.begin(folder, self.step)
        try:
            shard = write_shard(part / "rank-00000.safetensors", self._pieces)
            return commit.publish(part, Manifest(self.step, 1, self.tensors, [shard], data, [{}]), None, None)
        finally:
            commit.discard(part)


def read_dcp(source: ForeignCheckpoint, folder: Path) -> None:
    """Add the tensors of a DCP folder, and the optimizer's settings.

    If no name begins with `model.`, all that are not the optimizer's are the model's.

    Raises:
        CheckpointError: it is no DCP folder, is damaged, or refers to code.
    """
    path = folder / ".metadata"
    try:
        metadata = _read_metadata(path)
        places = _places(metadata)
        has_model = any(name.startswith(MODEL) for name in places)
        own_names = (name if has_model else MODEL + name for name in places if name.partition(".")[0] not in _OPTIM)
        model = {*own_names, *source.tensors}
        states: dict[str, None] = {}
        for name, (form, pieces) in places.items():
            kind, _, rest = name.partition(".")
            parameter, _, key = rest.removeprefix("state.").rpartition(".")
            own = name if has_model else MODEL + name
            if kind in _OPTIM and MODEL + parameter in model:
                own, states[parameter] = f"optim.{parameter}.{key}", None
            elif not own.startswith(MODEL) or kind in _OPTIM:  # also states by number, which only that job can tell
                source.left_out.append(name)
                continue
            reads = [(box, partial(_read_tensor, folder, name, box, info)) for box, info in pieces]
            source.add(own, form.size, dtype_name(name, form.properties.dtype), reads)
        others = [name for name in metadata.state_dict_metadata if name not in places]
        of_groups = [
            name for name in others if states and tuple(name.split(".")[:2]) in _GROUPS and name.count(".") > 2
        ]
        source.left_out += [name for name in others if name not in of_groups]
        if states:
            source.optim["groups"] = _read_groups(folder, of_groups, metadata) or [{"params": list(states)}]
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not read: {error}") from None
    except (*UNREADABLE, MemoryError) as error:
        raise CheckpointError(f"{path} is no metadata of DCP: {type(error).__name__}: {error}") from None


def _read_metadata(path: Path) -> Metadata:
    handle, num_bytes = open_regular(path)
    with open(handle, "rb") as file, reporting(f"{path} cannot be read"):
        data = file.read(_MAX_METADATA) if num_bytes <= _MAX_METADATA else b""
    check_pickle(data)
    metadata = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise CheckpointError("it holds something else than DCP's metadata")
    return metadata


def _places(metadata: Metadata) -> dict[str, tuple[TensorStorageMetadata, list[tuple[Box, Any]]]]:
    """Each tensor's form, and its boxes with the places of these in files. Any field may have any type."""
    places: dict[str, tuple[TensorStorageMetadata, list[tuple[Box, Any]]]] = {}
    for index, info in metadata.storage_data.items():
        form = metadata.state_dict_metadata.get(index.fqn)
        if isinstance(form, TensorStorageMetadata):
            sizes: Any = next((chunk.sizes for chunk in form.chunks if chunk.offsets == index.offset), None)
            box = Box(*(tuple(map(operator.index, numbers)) for numbers in (index.offset, sizes)))
            places.setdefault(check_name(index.fqn), (form, []))[1].append((box, info))
    return places


def _read_tensor(folder: Path, name: str, box: Box, info: Any) -> Tensor:
    values = _read_entry(folder, name, info)
    if not isinstance(values, Tensor) or tuple(values.shape) != box.sizes:
        raise CheckpointError(f"{folder} holds something else than {name!r} {box}; copy it again")
    if values.untyped_storage().nbytes() < values.nbytes:
        raise CheckpointError(f"{folder} has fewer values of {name!r} {box} than it shows; copy it again")
    return values


def _read_groups(folder: Path, names: list[str], metadata: Metadata) -> list[dict[str, Any]]:
    """The optimizer's groups, with names of parameters. DCP has each setting by group, or by parameter."""
    given: dict[str, dict[str, Any]] = {}
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    for name in names:
        of, _, key = name.split(".", 2)[2].rpartition(".")
        given.setdefault(of, {})[key] = _read_entry(folder, name, places.get(name))
    groups: list[dict[str, Any]] = []
    for of, group in given.items():
        parameters, own = list(map(check_name, group.get("params", [of]))), settings(group)
        same = next((other for other in groups if {**other, "params": None} == {**own, "params": None}), None)
        if same is None:
            groups.append({**own, "params": parameters})
        else:
            same["params"] += parameters
    return groups


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a group of parameters that are plain data of a moderate size.

    Raises:
        CheckpointError: they are not.
    """
    plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
    for key in ("params", "param_names", "step"):
        plain.pop(key, None)
    check(plain, "the settings of a group", _SETTINGS)  # also of containers that hold one another
    return plain


def _read_entry(folder: Path, name: str, info: Any) -> Any:
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
        data = io.BytesIO(file.read(length))
    try:
        check_archive(data, {})
        data.seek(0)
        return torch.load(data, map_location="cpu", weights_only=True)
    except (CheckpointError, *UNREADABLE) as error:
        raise CheckpointError(f"{folder / file_name} holds no plain {name!r}: {error}") from error


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
