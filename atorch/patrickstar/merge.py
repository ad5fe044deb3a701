"""Merges the checkpoints of all ranks, each of which has saved its part of the model, by the model's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from atorch.errors import ArgumentError, CheckpointError, shown
from atorch.files.access import check_target, replacing
from atorch.files.weights import CHECKPOINT, is_same, read_weights

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
