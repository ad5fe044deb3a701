"""The checkpoints of all ranks as one: each rank has saved its own part of the model, under the model's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from atorch.errors import ArgumentError, CheckpointError, shown

PLACE = "*"


def merge_checkpoints(pattern: str, num: int) -> Path:
    """Merge the state dicts of `num` ranks, the pattern with 0, 1, … for its `*`, and say where: at `merged` for it.

    Raises:
        ArgumentError: the pattern has no place for the rank, or more than one, or there are no ranks.
        CheckpointError: a file is missing, is no state dict, or has another value for a key than one before.
    """
    if pattern.count(PLACE) != 1 or num < 1:
        raise ArgumentError(
            f"the pattern is {pattern!r} for {num} ranks; it has one `*` where a file has its rank, of at least one: "
            "--pattern=checkpoint-*.pt --num=4"
        )
    paths = [Path(pattern.replace(PLACE, str(rank))) for rank in range(num)]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{', '.join(missing)} of {num} files are not there; give the number of ranks that saved")
    merged: dict[str, Any] = {}
    came_from: dict[str, Path] = {}
    for path in paths:
        for key, value in _state_dict(path).items():
            if key in merged and not _same(merged[key], value):
                raise CheckpointError(
                    f"{key} in {str(path)!r} differs from that in {str(came_from[key])!r}; each key is one rank's, or "
                    "the same on all: merge files of one step of one job"
                )
            merged.setdefault(key, value)
            came_from.setdefault(key, path)
    target = Path(pattern.replace(PLACE, "merged"))
    torch.save(merged, target)
    return target


def _state_dict(path: Path) -> dict[str, Any]:
    """The state dict in a file; nothing that it names is run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # The last one is what torch raises for a file that holds more than weights.
    except (OSError, EOFError, RuntimeError, torch.serialization.pickle.UnpicklingError) as error:  # type: ignore[attr-defined]
        raise CheckpointError(
            f"{str(path)!r} cannot be read as weights: {str(error).splitlines()[0]}; give what torch.save wrote of "
            "model.state_dict()"
        ) from error
    if not isinstance(state, dict) or "param_groups" in state or not all(isinstance(key, str) for key in state):
        what = "an optimizer's state" if isinstance(state, dict) and "param_groups" in state else shown(type(state))
        raise CheckpointError(f"{str(path)!r} holds {what}; what can be merged are files of model.state_dict()")
    return state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
