"""Checkpoints of other programs converted: torch.distributed.checkpoint's, DeepSpeed's, Accelerate's, state dicts.

Files of torch.save are read as weights only, with an exact list of names beside tensors; other pickles are not read.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.checkpoint.boxes import Box, flat_boxes, whole_box
from atorch.checkpoint.foreign import ForeignCheckpoint, read_dcp, settings
from atorch.checkpoint.pretrained import MODEL, indexed, model_files, open_pretrained
from atorch.checkpoint.shard_file import check_name, dtype_name, open_regular, reporting
from atorch.errors import CheckpointError, shown
from atorch.files import AnyPath, FileKind, read_bytes
from atorch.files.weights import UNREADABLE, read_weights

_FSDP_MODEL, _FSDP_OPTIMIZER, _TORCH_MODEL = "pytorch_model_fsdp_0", "optimizer_0", "pytorch_model.bin"
_TORCH_INDEX = f"{_TORCH_MODEL}.index.json"
_DEEPSPEED_FILE = re.compile(r"(?:\w*zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{2,6})_(model|optim)_states\.pt")
_TAG = FileKind("latest", CheckpointError, 1024)
_ADVICE = "read it with the program that wrote it, if you trust it"


class Converted(NamedTuple):
    """The folder of a converted checkpoint, and the names of what it does not have of the original."""

    path: Path
    left_out: list[str]


def convert(source: AnyPath, folder: AnyPath) -> Converted:
    """Write what another program has saved as a checkpoint in `folder`, on one process.

    Reads a folder of torch.distributed.checkpoint, DeepSpeed (ZeRO 0 to 3), Accelerate's `save_state` or Hugging Face,
    or a file of `torch.save(model.state_dict())`. With the optimizer's states by name, `load_checkpoint` resumes the
    run, but for random states and the loader's position. No code in the files runs.

    Raises:
        CheckpointError: it is none of these, is damaged, or refers to code.
    """
    given, found = Path(source), ForeignCheckpoint()
    with reporting(f"{given} cannot be read"):
        _read(given, found)
    return Converted(found.write(Path(folder)), found.left_out)


def _read(given: Path, found: ForeignCheckpoint) -> None:
    names = sorted(os.listdir(given)) if given.is_dir() else []
    taken: list[str] = names
    if ".metadata" in names:
        read_dcp(found, given)
    elif "latest" in names or any(_DEEPSPEED_FILE.fullmatch(name) for name in names):
        _read_deepspeed(found, given)
    elif given.is_file() and given.suffix != ".safetensors":
        _read_state_dicts(found, {Path(os.path.realpath(given)): []})
    elif _FSDP_MODEL in names:
        taken = [name for name in (_FSDP_MODEL, _FSDP_OPTIMIZER) if name in names]
        for name in taken:
            read_dcp(found, _inner(given, name))
    elif {_TORCH_MODEL, _TORCH_INDEX}.intersection(names) and not any(name.endswith(".safetensors") for name in names):
        files = {_TORCH_MODEL: []} if _TORCH_MODEL in names else indexed(given / _TORCH_INDEX)
        taken = [_TORCH_INDEX, *files]
        _read_state_dicts(found, {Path(os.path.realpath(given / name)): listed for name, listed in files.items()})
    else:
        with open_pretrained(given) as model:
            if "aliases" in model.plain:
                raise CheckpointError(f"{given} is a checkpoint of atorch already; load_checkpoint loads it")
            for name, (shape, dtype) in model.names.items():
                form = dtype_name(name, dtype)
                found.add(MODEL + name, shape, form, [(whole_box(shape), partial(model.read, name))])
        used = model_files(given)
        taken = [name for name in names if name.endswith(".json") or Path(os.path.realpath(given / name)) in used]
    found.left_out += [name for name in names if name not in taken]


def _inner(folder: Path, name: str) -> Path:
    """A folder in another one, which is no link to elsewhere."""
    if (folder / name).is_symlink():
        raise CheckpointError(f"{folder / name} is a link; give the folder itself")
    return folder / name


class _Plain:
    """Takes the attributes of an object of DeepSpeed's."""


OF_DEEPSPEED: Mapping[str, Any] = {
    "deepspeed.runtime.zero.config ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler LossScaler": _Plain,
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler": _Plain,
    "deepspeed.utils.tensor_fragment fragment_address": _Plain,
}


def _read_state_dicts(found: ForeignCheckpoint, files: Mapping[Path, Sequence[str]]) -> None:
    """Add the tensors of a model's files of torch.save, with the names that an index lists in each."""
    seen: dict[Any, str] = {}
    for path, listed in files.items():
        state = _saved(path, {})
        if lacking := next((name for name in listed if name not in state), None):
            raise CheckpointError(f"{path} has no {lacking!r}, which the index lists in it; copy it again")
        for name, value in state.items():
            if not isinstance(value, Tensor):
                found.left_out.append(str(name))
            elif (first := seen.setdefault((value.data_ptr() or name, value.shape, value.stride()), name)) != name:
                found.aliases[check_name(name)] = first
            else:
                _add_whole(found, name, value)


def _add_whole(found: ForeignCheckpoint, name: Any, value: Any) -> None:
    values = _tensor(value, f"the value of {shown(name)}")
    form = dtype_name(name, values.dtype)
    found.add(MODEL + check_name(name), values.shape, form, [(whole_box(values.shape), values)])


def _read_deepspeed(found: ForeignCheckpoint, folder: Path) -> None:
    if (folder / "latest").exists():
        tag = read_bytes(folder / "latest", _TAG).decode(errors="replace").strip()
        if os.path.basename(tag) != tag or tag in ("", ".", ".."):
            raise CheckpointError(f"{folder / 'latest'} holds {shown(tag)}, which is no name of a folder beside it")
        folder = _inner(folder, tag)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not there, which 'latest' beside it names; copy it too")
    files: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for name in sorted(os.listdir(folder)):
        match = _DEEPSPEED_FILE.fullmatch(name)
        if match is None and not name.endswith("_states.pt"):
            continue
        if match is None or int(match[2]):
            raise CheckpointError(
                f"{folder / name} is a part of a model that is divided by layers, experts or tensors; "
                "DeepSpeed's ds_to_universal.py merges such parts"
            )
        files[match[3]][int(match[1] or 0)] = folder / name
    states = {kind: [_saved(path) for _, path in sorted(listed.items())] for kind, listed in files.items()}
    for kind, listed in files.items():
        if list(listed) and sorted(listed) != list(range(len(listed))) or not files["model"]:
            raise CheckpointError(f"{folder} lacks a file of {kind}_states between those of other ranks; copy it again")
    try:
        _add_deepspeed(found, states["model"], states["optim"])
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is not read: {error}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{folder} is no checkpoint of DeepSpeed: {type(error).__name__}: {error}") from None


def _saved(path: Path, classes: Mapping[str, Any] = OF_DEEPSPEED) -> Mapping[Any, Any]:
    os.close(open_regular(path)[0])
    return _need(read_weights(path, _ADVICE, mmap=True, classes=classes), path)


def _add_deepspeed(
    found: ForeignCheckpoint, models: Sequence[Mapping[Any, Any]], optims: Sequence[Mapping[Any, Any]]
) -> None:
    model, zero = models[0], [_need(state["optimizer_state_dict"], "optimizer_state_dict") for state in optims]
    stage = zero[0].get("zero_stage", 1) if zero and "partition_count" in zero[0] else 0
    found.step = int(model.get("global_steps") or 0)
    found.left_out += ["random states", "the loader's position"]
    scheduler = model.get("lr_scheduler") or {}
    if "last_epoch" in scheduler:
        found.more["scheduler"] = settings(scheduler)
    elif scheduler:
        found.left_out.append("lr_scheduler, which is DeepSpeed's")
    trained = [_shapes(group) for group in (model.get("param_shapes") or [])] if stage else []
    found.aliases |= {check_name(name): check_name(first) for name, first in (model.get("shared_params") or {}).items()}
    frozen = _shapes(model.get("frozen_param_shapes") or {}) if stage == 3 else {}
    others = {name for shapes in trained for name in shapes} | found.aliases.keys() | frozen.keys()
    for name, value in _need(model["module"], "module").items():
        if name not in others:
            _add_whole(found, name, value)
    for name, shape in frozen.items():
        parts = [_tensor(state["frozen_param_fragments"][name], name).view(-1) for state in models]
        _add_cut(found, MODEL + name, shape, _by_parameter(math.prod(shape), 0, parts))
    if stage:
        _add_optimizer(found, stage, trained, zero)
    else:
        found.left_out.append("the optimizer, which numbers the parameters and does not name them")


def _add_optimizer(
    found: ForeignCheckpoint, stage: int, trained: Sequence[Any], zero: Sequence[Mapping[Any, Any]]
) -> None:
    """Add the parameters that are trained, with their fp32 values, and the optimizer's states and settings."""
    counts = zero[0]["partition_count"]
    if (max(counts) if isinstance(counts, list) else counts) != len(zero) or stage not in (1, 2, 3):
        raise CheckpointError(f"it is of stage {shown(stage)} on {shown(counts)} processes, with files of {len(zero)}")
    inner = [
        _need(state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"], "a state") for state in zero
    ]
    flats = [state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] for state in zero]
    paddings = zero[0].get("param_alignment_paddings") or [None] * len(trained)
    found.optim["groups"] = [settings(group) | {"params": []} for group in inner[0]["param_groups"]]
    group_of = {unit: at for at, group in enumerate(inner[0]["param_groups"]) for unit in group["params"]}
    for unit, (shapes, padding) in enumerate(zip(trained, paddings, strict=True)):
        masters = [_tensor(flat[unit], "fp32 values") for flat in flats]
        _add_group(found, stage, shapes, padding, masters, MODEL)
        at = group_of[unit]
        found.optim["groups"][at]["params"] += shapes
        states = [_need(state["state"].get(unit, {}), "a state") for state in inner]
        for key, value in {"step": inner[0]["param_groups"][at].get("step"), **states[0]}.items():
            if key == "step" and value is not None:
                for name in shapes:
                    found.add(f"optim.{name}.step", (), "F32", [(whole_box(()), torch.tensor(float(value)))])
            elif isinstance(value, Tensor) and value.numel() >= masters[0].numel():
                values = [_tensor(state[key], key) for state in states]
                _add_group(found, stage, shapes, padding, values, "optim.", f".{check_name(key)}")
            elif value is not None:
                found.left_out.append(f"{shown(key)} of the optimizer")
    scale = getattr(zero[0].get("loss_scaler"), "cur_scale", None)
    if zero[0].get("dynamic_loss_scale") and scale is not None:
        found.optim["loss_scale"] = {"scale": float(scale), "good_steps": 0}


def _add_group(
    found: ForeignCheckpoint, stage: int, shapes: Mapping[str, Any], padding: Any, flats: Sequence[Tensor],
    prefix: str, suffix: str = "",
) -> None:  # fmt: skip
    """Add the tensors of a group's parameters from the flat tensors of all ranks."""
    at = 0
    for (name, shape), more in zip(shapes.items(), [0] * len(shapes) if padding is None else padding, strict=True):
        numel = math.prod(shape)
        if stage == 3:
            parts = _by_parameter(numel, at, flats)
            at += -(-numel // len(flats))
        else:
            parts = _of_group(numel, at, flats)
            at += numel + int(more)
        _add_cut(found, f"{prefix}{name}{suffix}", shape, parts)
    unit = 1 if stage == 3 else 2 * len(flats)  # to which groups are filled up
    held = flats[0].numel() if stage == 3 else sum(flat.numel() for flat in flats)
    if -(-at // unit) != -(-held // unit):
        raise CheckpointError(f"its parameters have {at:,} values, and its files {held:,}; copy the files again")


def _of_group(numel: int, start: int, flats: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """The parts of a parameter that begins at `start` of the ranks' tensors, one after the other."""
    size = max(flat.numel() for flat in flats)  # the last rank's padding may be left out
    for rank, flat in enumerate(flats):
        first, stop = max(start, rank * size), min(start + numel, (rank + 1) * size)
        if first < stop:
            yield first - start, stop - start, flat[first - rank * size : stop - rank * size]


def _by_parameter(numel: int, at: int, flats: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """The parts of a parameter that is cut on its own into as many equal parts as there are ranks."""
    size = -(-numel // len(flats))
    for rank, flat in enumerate(flats):
        first, stop = rank * size, min(numel, (rank + 1) * size)
        if first < stop:
            yield first, stop, flat[at : at + stop - first]


def _add_cut(found: ForeignCheckpoint, name: str, shape: Any, parts: Iterator[tuple[int, int, Tensor]]) -> None:
    """Add a tensor of flat ranges with their values."""
    pieces: list[tuple[Box, Tensor]] = []
    dtype = torch.float32
    for first, stop, values in parts:
        if values.numel() != stop - first:
            raise CheckpointError(f"{name!r} has fewer values than its shape; copy the files again")
        boxes = flat_boxes(shape, first, stop)
        pieces += [(box, values[at : at + box.numel].view(box.sizes)) for box, at in boxes]
        dtype = values.dtype
    found.add(name, shape, dtype_name(name, dtype), pieces)


def _shapes(given: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters by name, as numbers, whatever a file has in their place."""
    shapes = _need(given, "a group of param_shapes")
    return {check_name(name): tuple(map(operator.index, shape)) for name, shape in shapes.items()}


def _tensor(value: Any, what: str) -> Tensor:
    """`value` if it is a tensor with as many values in memory as it shows."""
    values = Tensor.detach(value) if isinstance(value, Tensor) else None  # without attributes that files set
    if values is None or values.layout != torch.strided or not values.is_contiguous() or values.is_meta:
        raise CheckpointError(f"{what} is {shown(value)}, no contiguous tensor")
    return values


def _need(value: Any, what: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{what} is {shown(value)}, no dict; {_ADVICE}")
    return value
