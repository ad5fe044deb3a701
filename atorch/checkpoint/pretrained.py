"""Whole models as Hugging Face has them: `model.safetensors`, or several such files and an index, read and written."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from atorch.checkpoint import commit
from atorch.checkpoint.boxes import LogicalTensor, flat_boxes, whole_box
from atorch.checkpoint.manifest import Manifest, Saved, fields, need, saved_tensor
from atorch.checkpoint.reading import Checkpoint
from atorch.checkpoint.shard_file import (
    BLOCK_BYTES,
    DTYPES,
    NAMES,
    Shard,
    Stored,
    check_name,
    empty,
    header,
    open_regular,
    reporting,
    write_all,
)
from atorch.distributed.collectives import all_or_none, from_rank_zero, global_rank, is_distributed
from atorch.errors import CheckpointError, shown
from atorch.files import AnyPath, FileKind, read_bytes, write
from atorch.units import MiB

MODEL = "model."  # begins the names of the model's tensors in a checkpoint
CONFIGS = ("config", "generation_config")  # names of files, and of a model's attributes
MAX_FILE_BYTES = 5 * 10**9  # of an exported model, as Hugging Face's own; a larger tensor has a file of its own
_FILE = "model.safetensors"
_INDEX = FileKind(f"{_FILE}.index.json", CheckpointError, 64 * MiB)
_MAX_HEADER = 100_000_000


class _Piece(NamedTuple):
    """A tensor to write: its name in the file and in the checkpoint, and its shape and dtype in the file."""

    name: str
    full_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_pretrained(path: AnyPath) -> Checkpoint:
    """Open a safetensors file, a folder of such files, or a checkpoint, the newest one of a folder of them.

    All ranks call it together. Links are followed.

    Raises:
        CheckpointError: on all ranks: there is no such thing, or a file is damaged.
    """
    given = Path(path)
    has_checkpoint = from_rank_zero(all_or_none(lambda: global_rank() == 0 and _has_checkpoint(given)))
    return Checkpoint.open(given) if has_checkpoint else all_or_none(lambda: _opened(given))


def model_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The names that the model's tensors have in a checkpoint, by their names in the model."""
    if "aliases" not in checkpoint.plain:  # of another program
        return {name: name for name in checkpoint.names}
    return {name.removeprefix(MODEL): name for name in checkpoint.names if name.startswith(MODEL)}


def _has_checkpoint(path: Path) -> bool:
    return path.is_dir() and (commit.is_checkpoint(path) or bool(commit.steps(path)))


def _opened(path: Path) -> Checkpoint:
    tensors: dict[str, Saved] = {}
    shards: list[Shard] = []
    starts: dict[int, bytes] = {}
    for file, names in model_files(path).items():
        shard, start, found = _read_header(file)
        for name in found:
            if name in tensors:
                raise CheckpointError(f"{path} has {name!r} in two files; remove the one that is not of the model")
        lacking = next((name for name in names if name not in found), None)
        if lacking is not None:
            raise CheckpointError(f"{file} has no {lacking!r}, which the index of {path} lists in it; copy it again")
        starts[len(shards)] = start
        shards.append(shard)
        tensors.update(found)
    return Checkpoint(path, Manifest(0, 1, tensors, shards, {}, [{}]), starts)


def model_files(path: Path) -> dict[Path, list[str]]:
    """The safetensors files of a model, and the tensors that an index lists in them."""
    with reporting(f"{path} cannot be read"):
        folder = path if path.is_dir() else path.parent
        names = [path.name] if folder is not path else sorted(name.name for name in path.glob("*.safetensors"))
        files: dict[str, list[str]] = {name: [] for name in ([_FILE] if _FILE in names else names)}
        if folder is path and (path / _INDEX.name).exists():
            files = indexed(path / _INDEX.name)
        elif not files or not all((folder / name).is_file() for name in files):
            raise CheckpointError(
                f"{path} is no safetensors file, nor a folder with such files or checkpoints; give one of these, or "
                "convert what another program has saved: atorch checkpoint convert"
            )
        return {Path(os.path.realpath(folder / name)): listed for name, listed in files.items()}


def indexed(path: Path) -> dict[str, list[str]]:
    """The names of the files that an index of Hugging Face lists, and of the tensors in each."""
    content, suffix = _parsed(path, read_bytes(path, _INDEX)), path.suffixes[0]
    files: dict[str, list[str]] = {}
    for name, file in need(content.get("weight_map"), dict, f"weight_map in {path}").items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(suffix):
            raise CheckpointError(f"{path} lists {shown(file)}, which is no name of a {suffix} file in its folder")
        files.setdefault(file, []).append(check_name(name))
    return files


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        content: dict[str, Any] = need(json.loads(data), dict, f"the content of {path}")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} holds no JSON of a model ({error}); copy it again") from None
    return content


def _read_header(path: Path) -> tuple[Shard, bytes, dict[str, Saved]]:
    """A safetensors file of any program: its pieces, the bytes before their data, and its tensors by name."""
    handle, num_bytes = open_regular(path)
    with open(handle, "rb") as file, reporting(f"{path} cannot be read"):
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(_MAX_HEADER, num_bytes - 8):
            raise CheckpointError(f"{path} is no safetensors file: it has no header")
        start += file.read(length)
    content = _parsed(path, start[8:])
    content.pop("__metadata__", None)
    placed, tensors = [], {}
    for name, entry in content.items():
        entry = need(entry, dict, f"{shown(name)} in {path}")
        saved = tensors[check_name(name)] = saved_tensor(name, [entry.get("shape"), entry.get("dtype")])
        first, stop = (
            need(at, int, f"{shown(name)} in {path}") for at in fields(entry.get("data_offsets"), 2, shown(name))
        )
        placed.append((first, stop, name, whole_box(saved.shape)))
    at = 0
    for first, stop, name, box in sorted(placed):
        if first != at or stop - first != box.numel * DTYPES[tensors[name].dtype].itemsize:
            raise CheckpointError(f"{path} is damaged: {name!r} has not the bytes of its shape; copy it again")
        at = stop
    if len(start) + at != num_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes:,} bytes, and its header is of {len(start) + at:,}; copy it again"
        )
    return Shard(str(path), num_bytes, [Stored(name, box, []) for *_, name, box in sorted(placed)]), start, tensors


@contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """A folder next to `path`, the same on all ranks, which is removed at the end of the block.

    Raises:
        CheckpointError: on all ranks: it cannot be made, or there is something at `path`.
    """

    def made() -> Path | None:
        if global_rank() != 0:
            return None
        with reporting(f"{path} cannot be written"):
            if os.path.lexists(path) and not (path.is_dir() and not os.listdir(path)):
                raise CheckpointError(f"{path} is there already; give the path of a new folder")
            folder = path.parent / f".{path.name}.{secrets.token_hex(8)}.part"
            folder.mkdir(parents=True)
            return folder

    folder = from_rank_zero(all_or_none(made))
    assert folder is not None, "rank 0 has made it"
    try:
        yield folder
    finally:
        if global_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def export_model(
    checkpoint: Checkpoint,
    path: AnyPath,
    dtype: torch.dtype | None = None,
    stem: str = "model",
    more: Iterable[Any] = (),
) -> None:
    """Write the model of a checkpoint as a folder that appears when it is complete. All ranks call it together.

    Each rank writes some of the files, and holds some MiB at a time. `stem`: of the files' names. `more`: what writes
    more files into the folder with its `save_pretrained`.

    Raises:
        CheckpointError: on all ranks: it cannot be written, or the checkpoint is damaged.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in NAMES):
        raise CheckpointError(f"dtype is {shown(dtype)}; give a floating-point one, or None to keep what there is")
    target, num_ranks = Path(path), dist.get_world_size() if is_distributed() else 1
    names = all_or_none(lambda: model_names(checkpoint))
    pieces: list[_Piece] = []
    for name, full in names.items():
        shape, own = checkpoint.names[full]
        pieces.append(_Piece(name, full, shape, dtype if dtype is not None and own.is_floating_point else own))
    shards: list[list[_Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(other.num_bytes for other in shards[-1]) + piece.num_bytes > MAX_FILE_BYTES:
            shards.append([])
        shards[-1].append(piece)
    many = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    files = dict(zip(many if len(shards) > 1 else [f"{stem}.safetensors"], shards, strict=True))
    with hidden_folder(target) as folder:

        def written() -> None:
            for file, listed in list(files.items())[global_rank() :: num_ranks]:
                _write_file(folder / file, checkpoint, listed)

        def completed() -> None:
            if global_rank() != 0:
                return
            if len(files) > 1:
                index = {piece.name: file for file, listed in files.items() for piece in listed}
                total = {"total_size": sum(piece.num_bytes for piece in pieces)}
                _write_json(folder / _INDEX.name, {"metadata": total, "weight_map": index})
            _write_configs(folder, checkpoint, pieces)
            for one in more:
                one.save_pretrained(folder)
            with reporting(f"{target} cannot be written"):
                commit.sync(folder)
                os.rename(folder, target)
                commit.sync(target.parent)

        all_or_none(written)
        all_or_none(completed)


def _write_configs(folder: Path, checkpoint: Checkpoint, pieces: list[_Piece]) -> None:
    floating = next((piece.dtype for piece in pieces if piece.dtype.is_floating_point), torch.float32)
    for name in filter(checkpoint.plain.get, CONFIGS):
        more = {"dtype": str(floating).removeprefix("torch.")} if name == "config" else {}
        _write_json(folder / f"{name}.json", checkpoint.plain[name] | more)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write(path, json.dumps(content, indent=2, sort_keys=True) + "\n", _INDEX)


def _write_file(path: Path, checkpoint: Checkpoint, pieces: list[_Piece]) -> None:
    pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # aligned, without gaps
    start = header([(piece.name, NAMES[piece.dtype], whole_box(piece.shape)) for piece in pieces])
    with reporting(f"{path} cannot be written"), open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), memoryview(start))
        for _, full, shape, dtype in pieces:
            length, numel = 4 * BLOCK_BYTES // dtype.itemsize, math.prod(shape)
            for first in range(0, numel, length):
                block = empty((min(length, numel - first),), dtype)
                boxes = flat_boxes(shape, first, first + len(block))
                parts = [(box, block[at : at + box.numel].view(box.sizes)) for box, at in boxes]
                checkpoint.load_alone({full: LogicalTensor(shape, dtype, parts)})
                write_all(file.fileno(), block.view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
