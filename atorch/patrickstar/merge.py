"""State dicts in parts: each process saves and loads its part of a model, and the parts of all ranks are merged.

A process saves, whole, every parameter that overlaps its shards; one at the border of two shards is saved by both
processes. The union of all parts is the whole state. `merge_checkpoints` merges them by the model's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atorch.checkpoint.boxes import LogicalTensor, whole_box
from atorch.distributed.collectives import all_or_none, gather_objects
from atorch.errors import ArgumentError, CheckpointError, shown
from atorch.files import check_target, replacing
from atorch.files.weights import CHECKPOINT, is_same, read_weights
from atorch.runtime.data_parallel.buckets import gathered
from atorch.runtime.optimizer.held_tensors import held_tensors

PLACE = "*"
SHOWN = 8  # maximum number of files that an error lists


def merge_checkpoints(pattern: str, num: int) -> Path:
    """Merge the files of `num` ranks, with 0, 1, … for `*` in the pattern, to one with `merged`; returns its path.

    Raises:
        ArgumentError: the pattern does not have exactly one `*`, or `num` is below 1.
        CheckpointError: a file is missing, is not a state dict, or contradicts another file's value of a key; or the
            merged file cannot be written.
    """
    if pattern.count(PLACE) != 1 or num < 1:
        raise ArgumentError(
            f"the pattern is {pattern!r} for {num} ranks; it has one `*` where a file has its rank, of at least one: "
            "--pattern=checkpoint-*.pt --num=4"
        )
    paths = [Path(pattern.replace(PLACE, str(rank))) for rank in range(num)]
    target = Path(pattern.replace(PLACE, "merged"))
    check_target(target, CHECKPOINT)
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise CheckpointError(
            f"{', '.join(missing[:SHOWN])}{more} of {num} files are not there; give the number of ranks that saved"
        )
    merged: dict[str, Any] = {}
    came_from: dict[str, Path] = {}
    for path in paths:
        for key, value in _state_dict(path).items():
            if key in merged and not _compared(key, path, merged[key], value):
                raise CheckpointError(
                    f"{key} in {str(path)!r} differs from that in {str(came_from[key])!r}; each key is one rank's, or "
                    "the same on all: merge files of one step of one job"
                )
            merged.setdefault(key, value)
            came_from.setdefault(key, path)
    with replacing(target, CHECKPOINT) as file:
        torch.save(merged, file)
    return target


def _state_dict(path: Path) -> Mapping[str, Any]:
    """Load the state dict in a file, without running code."""
    state = read_weights(path, "give what torch.save wrote of model.state_dict(), or merge files of another step")
    if not isinstance(state, dict) or "param_groups" in state or not all(isinstance(key, str) for key in state):
        what = "an optimizer's state" if isinstance(state, dict) and "param_groups" in state else shown(type(state))
        raise CheckpointError(f"{str(path)!r} holds {what}; what can be merged are files of model.state_dict()")
    return state


def _compared(key: str, path: Path, one: Any, other: Any) -> bool:
    try:
        return is_same(one, other)
    except RuntimeError as error:  # also of containers that hold themselves, and of tensors without values
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(
            f"{key} in {str(path)!r} cannot be compared with that of another rank ({reason}); "
            "leave it out of what all but one rank save"
        ) from error


@torch.no_grad()
def own_part(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The part of the model's `state` that this process saves, in fp32 on the host. All processes must call it.

    It has, whole, what overlaps this process's chunks, and the first process's values of all else.
    """
    held = {entry.name: entry for entry in held_tensors(model)}
    parts = {name: entry.logical() for name, entry in held.items()}
    # `gathered` is collective, so all processes iterate over everything, and keep what they hold elements of.
    wholes = {
        alias: whole.cpu()
        for name, whole in gathered(parts)
        if name in parts and any(box.numel for box, _ in parts[name].pieces)
        for alias in held[name].names
    }
    part = type(state)()
    part.update(
        (name, wholes.get(name, value))
        for name, value in state.items()
        if name in wholes or not isinstance(value, Tensor)
    )
    return part


@torch.no_grad()
def load_parts(model: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Load this process's part of a state, and receive the rest from the others. All processes must call it.

    Returns, as `Module.load_state_dict`, the keys that no process has, and those that are not the model's.

    Raises:
        RuntimeError: there are such keys and `strict` is set, or a shape differs.
    """
    result = all_or_none(lambda: model.load_state_dict(state, strict=False))
    missing_by_rank = gather_objects(set(result.missing_keys))
    part = {name: state[name] for name in sorted(set.union(*missing_by_rank)) if name in state}
    parts = {
        name: LogicalTensor(tuple(value.shape), value.dtype, [(whole_box(value.shape), value)])
        for name, value in part.items()
        if isinstance(value, Tensor)
    }
    targets = model.state_dict(keep_vars=True)
    for name, value in gathered(parts):
        targets[name].copy_(value)
    missing = [name for name in result.missing_keys if all(name in names for names in missing_by_rank)]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"the state does not fit {type(model).__name__}: no process has {shown(missing)}, and "
            f"{shown(result.unexpected_keys)} are not the model's; load what an engine of this model has saved, or "
            "pass strict=False"
        )
    return type(result)(missing, result.unexpected_keys)
