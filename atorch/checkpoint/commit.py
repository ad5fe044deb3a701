"""The steps of a folder: a checkpoint is written next to them, and published by one rename.

step-000000012/                       complete, and never touched
.step-000000013.<16 hex>.part/        being written, or being removed; the next save removes what is left
.step-000000012.old/                  complete, while the same step is saved again: read if nothing has taken its place
newest                                the name of the highest step's folder: a convenience, which nothing here reads
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from atorch.checkpoint.manifest import MANIFEST, Manifest
from atorch.checkpoint.shard_file import reporting
from atorch.errors import CheckpointError

_STEP = re.compile(r"step-(\d{9,18})|\.step-(\d{9,18})\.old")
_PART = re.compile(r"\.step-\d{9,18}\.[0-9a-f]{16}\.part")


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of the complete checkpoints in `folder`, ascending; empty if there is no such folder.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return sorted(complete_steps(Path(folder)))


def complete_steps(folder: Path) -> dict[int, Path]:
    """The folder of each complete checkpoint, by step."""
    found: dict[int, Path] = {}
    with reporting(f"{folder} cannot be read"):
        for name in sorted(os.listdir(folder)) if os.path.lexists(folder) else []:  # that of an old one comes first
            match = _STEP.fullmatch(name)
            if match is not None and os.path.lexists(folder / name / MANIFEST):
                step = int(match[1] or match[2])
                if name in (name_of(step), f".{name_of(step)}.old"):
                    found[step] = folder / name
    return found


def begin(folder: Path, step: int) -> Path:
    """Make the folder that the checkpoint of `step` is written in; remove what killed saves have left.

    Raises:
        CheckpointError: it cannot be made.
    """
    with reporting(f"{folder} cannot hold a checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(other := folder / name_of(step)) and not os.path.lexists(other / MANIFEST):
            raise CheckpointError(f"{other} exists and is not a checkpoint; remove it, or give another folder")
        if is_checkpoint(folder):
            raise CheckpointError(f"{folder} is a checkpoint itself; give the folder that it is in")
        _settle(folder)
        part = _part(folder, step)
        part.mkdir()
        return part


def publish(part: Path, manifest: Manifest, keep_last: int | None, keep_every: int | None) -> Path:
    """Complete a folder of `begin` and make it the checkpoint of its step; then remove old ones.

    Raises:
        CheckpointError: it cannot be published, and the earlier ones stand; or old ones cannot be removed.
    """
    folder, step = part.parent, manifest.step
    final = folder / name_of(step)
    manifest.write(part)
    with reporting(f"{final} cannot be published"):
        sync(part)
        if os.path.lexists(final):
            os.rename(final, folder / f".{name_of(step)}.old")
        os.rename(part, final)
        sync(folder)
    with reporting(f"{final} is complete, but older ones cannot be removed"):
        pointer = folder / ".newest.part"
        pointer.write_text(f"{name_of(max(complete_steps(folder)))}\n")
        os.replace(pointer, folder / "newest")
        _settle(folder)
        kept = {step, *sorted(complete_steps(folder))[-keep_last:]} if keep_last is not None else set()
        for other, path in complete_steps(folder).items() if kept else ():
            if other not in kept and not (keep_every and other % keep_every == 0):
                remove(path, other)
    return final


def _settle(folder: Path) -> None:
    """Bring back an old checkpoint whose replacement was not published; remove what is left of others."""
    for name in os.listdir(folder):
        match = _STEP.fullmatch(name)
        if match is not None and match[2] is not None:
            step = int(match[2])
            if os.path.lexists(folder / name_of(step)):
                remove(folder / name, step)
            else:
                os.rename(folder / name, folder / name_of(step))
        elif _PART.fullmatch(name):
            shutil.rmtree(folder / name)


def remove(path: Path, step: int) -> None:
    """Remove a checkpoint, which is incomplete from its first moment on."""
    part = _part(path.parent, step)
    os.rename(path, part)
    shutil.rmtree(part)


def name_of(step: int) -> str:
    return f"step-{step:09}"


def _part(folder: Path, step: int) -> Path:
    return folder / f".{name_of(step)}.{secrets.token_hex(8)}.part"


def sync(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(part: Path) -> None:
    """Remove a folder of `begin`, as far as that is possible."""
    shutil.rmtree(part, ignore_errors=True)


def is_checkpoint(folder: Path) -> bool:
    """True for the folder of one checkpoint, as `publish` returns it, or moved to another name."""
    if not os.path.lexists(folder / MANIFEST) or _PART.fullmatch(folder.name):
        return False
    return _STEP.fullmatch(folder.name) is not None or any(folder.glob("rank-*.safetensors"))


def path_of(folder: Path, step: int | None) -> tuple[int | None, Path]:
    """The step, by default the newest, and the folder of its checkpoint, which may be `folder` itself.

    The step is None if that folder has another name.

    Raises:
        CheckpointError: there is none.
    """
    if is_checkpoint(folder) and step is None:
        match = _STEP.fullmatch(folder.name)
        return match and int(match[1] or match[2]), folder
    found = complete_steps(folder)
    wanted = max(found, default=None) if step is None else step
    if wanted is None or wanted not in found:
        there = f"there are {', '.join(map(str, sorted(found)[-10:]))}" if found else "there is no complete one"
        raise CheckpointError(f"{folder} holds no checkpoint{'' if step is None else f' of step {step!r}'}; {there}")
    return wanted, found[wanted]
