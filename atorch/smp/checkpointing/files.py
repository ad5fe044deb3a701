"""`smp.save` and `smp.load`: partial checkpoints, a file for each process of a model, and full ones in one file.

Files are replaced atomically, and read with `weights_only`: loading never runs code.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from atorch.distributed.barrier_diagnostics import listed
from atorch.errors import ArgumentError, CheckpointError, check_bools, shown
from atorch.files import check_source, replacing
from atorch.files.weights import CHECKPOINT, read_weights
from atorch.logs import OF_THIS_RANK, logger
from atorch.smp.checkpointing.states import merged
from atorch.smp.ranks import mp_rank, mp_size, pp_size, rdp_rank, tp_size
from atorch.smp.session import session

_MARK = "smp_save.json"
"""The record of a file of torch.save with the name of its save and the arrangement of its processes."""
_MAX_MARK = 4096  # bytes

# Exceptions of pickling for unsupported objects, such as a lambda.
_UNWRITABLE = (AttributeError, TypeError, torch.serialization.pickle.PicklingError)  # type: ignore[attr-defined]
PLAIN = "tensors, numbers, strings, and lists and dicts of them are plain"
GIVE = (
    f"{PLAIN}: give those, and of what has a state, such as a data loader, its state_dict() or the number of the batch"
)
ADVICE = (
    f"{PLAIN}: save those, or, where you trust the file, name its classes to torch.serialization.add_safe_globals first"
)


class PartialFiles(NamedTuple):
    """The files of a partial checkpoint: their path before and after the process's `mp_rank`.

    Each file records its save and the arrangement of the processes: files of different saves are never merged.
    """

    start: str
    end: str = ""

    def path(self, number: int) -> str:
        """The file of the process whose `mp_rank` is `number`."""
        return f"{self.start}{number}{self.end}"

    def write(self, obj: Any, save: str) -> None:
        """Write this process's file.

        save: name of the save, equal on all processes.

        Raises:
            CheckpointError: the file cannot be written.
        """
        write_file(obj, self.path(mp_rank()), mark={**_arrangement(), "save": save})

    def read(self, map_location: Any = None, mmap: bool | None = None) -> tuple[Any, str | None]:
        """Read this process's file, or merge all files if the arrangement of processes differs.

        Returns the contents and the name of the save; None if the files record none.

        Raises:
            CheckpointError: files are missing, unreadable, of different saves, or incomplete.
        """
        marks = {number: _mark(self.path(number)) for number in self.numbers()}
        if not marks:
            raise CheckpointError(f"there is no partial checkpoint {shown(self.path(mp_rank()))}")
        # Every save writes file 0; higher numbers may be left over from a save of more processes.
        number, current = 0 if 0 in marks else mp_rank() if mp_rank() in marks else min(marks), _arrangement()
        saved = marks[number] or (current if len(marks) == current["mp_size"] else {"mp_size": len(marks)})
        size = saved.get("mp_size")
        if type(size) is not int or size < 1:
            raise CheckpointError(
                f"{shown(self.path(number))} says its processes were arranged as {shown(saved)}; save it again"
            )
        is_alike = {key: saved.get(key) for key in current} == current
        numbers = [mp_rank()] if is_alike else range(size)
        missing = [number for number in numbers if number not in marks]
        if missing:
            raise CheckpointError(
                f"a partial checkpoint has the {size} files {shown(self.path(0))} to {size - 1}, of which "
                f"{listed(missing)} are not there; copy them to the others, or load another checkpoint"
            )
        saves = {mark.get("save"): self.path(number) for number, mark in marks.items() if number < size}
        if len(saves) > 1:
            raise CheckpointError(
                f"{' and '.join(map(shown, saves.values()))} are of different saves, of which one was not finished; "
                "load another checkpoint, or, where processes are saving it, call smp.barrier() first"
            )
        parts = [read_weights(self.path(number), ADVICE, map_location, mmap) for number in numbers]
        return parts[0] if is_alike else merged(parts, shown(self.start)), next(iter(saves))

    def numbers(self) -> list[int]:
        path = Path(self.path(0)).parent
        names = (str(path / file.name) for file in path.iterdir()) if path.is_dir() else ()
        start, end = re.escape(str(path / Path(f"{self.start}0").name[:-1])), re.escape(self.end)
        matches = (re.fullmatch(rf"{start}(0|[1-9]\d*){end}", name) for name in names)
        return sorted(int(match[1]) for match in matches if match is not None)


def write_file(obj: Any, path: str, *, is_refused: bool = False, mark: Mapping[str, Any] | None = None) -> None:
    """Write one file atomically. If it could not be loaded, log a warning, or with `is_refused` raise.

    mark: what to record with the contents.

    Raises:
        CheckpointError: it cannot be written, or could not be loaded; an existing file stays.
    """
    quoted = shown(os.path.basename(path))
    with replacing(path, CHECKPOINT) as file:
        try:
            torch.save(obj, file)
        except _UNWRITABLE as error:
            raise CheckpointError(f"{quoted} cannot be written: {error}; {GIVE}") from error
        file.flush()
        if mark is not None:
            with zipfile.ZipFile(file.name, "a") as archive:
                folder = archive.namelist()[0].partition("/")[0]
                archive.writestr(f"{folder}/{_MARK}", json.dumps(mark))
        reason = _refusal(file.name)
        if reason and is_refused:
            raise CheckpointError(f"{quoted} could not be loaded again: {reason}; {GIVE}")
    if reason:
        logger.warning("smp.load will refuse %s: %s; %s", quoted, reason, PLAIN, extra=OF_THIS_RANK)


def _refusal(path: str) -> str:
    """The reason why a file of torch.save could not be loaded; "" if it could."""
    try:
        read_weights(path, "", mmap=True)
    except CheckpointError as error:
        return str(error).partition(" cannot be read as weights: ")[2].removesuffix("; ")
    return ""


def _arrangement() -> dict[str, Any]:
    """The arrangement of the processes of a model, which determines the part of each `mp_rank`."""
    stages, slices = pp_size(), tp_size()
    order = session().config.placement.replace("D", "") if stages > 1 and slices > 1 else ""
    return {"mp_size": mp_size(), "pp_size": stages, "tp_size": slices, "order": order}


def _mark(path: str) -> dict[str, Any]:
    """The arrangement of the processes that saved a file, and the save; {} if the file records none."""
    check_source(path, CHECKPOINT)
    if not zipfile.is_zipfile(path):
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{_MARK}")]
            mark = json.loads(archive.open(names[0]).read(_MAX_MARK)) if names else {}
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{shown(path)} cannot be read: {error}; load another checkpoint") from None
    return mark if isinstance(mark, dict) and isinstance(mark.get("save"), str) else {}


MapLocation = Callable[[Any, str], Any] | torch.device | str | dict[str, str] | None


def save(
    obj: Any, f: str, partial: bool = True, pickle_module: ModuleType | None = None, pickle_protocol: int = 2,
    v3: bool = False,
) -> None:  # fmt: skip
    """Write an object to a file, as torch.save does; a killed process leaves the old file or the new one.

    Args:
        partial: each process of a model writes its own file, `f` with its `mp_rank`, such as `model.pt_0`. All
            processes of one replica call it: those with `rdp_rank()` 0, or, without tensor parallelism, `dp_rank()` 0.
            If False, the one file `f` is written.
        pickle_module: None or the standard pickle.
        pickle_protocol: 2, the only one that loads without running code.
        v3: processes of all replicas call it, and only the first replica writes: its `local_state_dict` is complete.

    Raises:
        ArgumentError: `f` is not a string, `pickle_module` is another pickle, `pickle_protocol` is another protocol, or
            a flag is not a bool.
        CheckpointError: the file cannot be written.
    """
    _check(f, pickle_module, "smp.save")
    check_bools("smp.save", partial=partial, v3=v3)
    if pickle_protocol != 2:
        raise ArgumentError(
            f"pickle_protocol is {shown(pickle_protocol)}; smp.load, which never runs code, reads 2 alone: leave it out"
        )
    if v3 and rdp_rank() != 0:
        return
    if partial:
        current = session()
        current.saves[f] += 1  # counts alike on all processes: one name of the save without communication
        PartialFiles(f"{f}_").write(obj, f"{current.name} {current.saves[f]}")
    else:
        write_file(obj, f)


def load(
    f: str,
    map_location: MapLocation = None,
    pickle_module: ModuleType | None = None,
    partial: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Load a file of `save` or torch.save.

    A partial checkpoint of another number or arrangement of processes is merged from all its files: its partial states
    become whole ones. Loading never runs code.

    Args:
        map_location: the device of tensors, as for torch.load: a function, a device, a string or a dict.
        pickle_module: None or the standard pickle.
        partial: read this process's file, `f` with its `mp_rank`; else the one file `f`.
        pickle_load_args: `mmap`, `weights_only`, which can only be True, and `back_compat`, which has no effect.

    Raises:
        ArgumentError: `f` is not a string, `pickle_module` is another pickle, or an argument is unknown.
        CheckpointError: files are missing, which the error lists, unreadable, or hold more than plain data.
    """
    _check(f, pickle_module, "smp.load")
    check_bools("smp.load", partial=partial)
    if not pickle_load_args.pop("weights_only", True):
        raise ArgumentError("smp.load was given weights_only=False, and never runs code out of a file; leave it out")
    mmap = pickle_load_args.pop("mmap", None)
    pickle_load_args.pop("back_compat", None)
    if pickle_load_args:
        raise ArgumentError(
            f"smp.load was given {', '.join(sorted(pickle_load_args))}; files are read as weights alone, where such an "
            "argument of unpickling means nothing: leave it out"
        )
    parts = PartialFiles(f"{f}_")
    if partial:
        if Path(f).exists() and not parts.numbers():
            raise CheckpointError(
                f"{shown(f)} is there, and no parts of it are; give partial=False for a full checkpoint"
            )
        loaded, _ = parts.read(map_location, mmap)
        return loaded
    if not Path(f).exists() and parts.numbers():
        raise CheckpointError(f"there is no checkpoint {shown(f)}, but {shown(parts.path(0))}; give partial=True")
    return read_weights(f, ADVICE, map_location, mmap)


def _check(f: Any, pickle_module: Any, call: str) -> None:
    if not isinstance(f, str):
        raise ArgumentError(f"{call} was given {shown(f)} for f; it takes a file's name, a string: give str(path)")
    if not os.path.basename(f):
        raise ArgumentError(f"{call} was given {shown(f)} for f, which names no file; give the path of a file")
    standard = sys.modules.get("pickle")
    if pickle_module is not None and pickle_module is not standard:
        name = getattr(pickle_module, "__name__", shown(pickle_module))
        raise ArgumentError(f"{call} was given pickle_module {name}; it takes the standard pickle: leave it out")
