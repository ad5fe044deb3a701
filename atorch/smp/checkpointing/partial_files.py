"""A checkpoint's files, one for each process of a model, and their merge for another arrangement of processes.

The partial states in a file record the arrangement of the processes that saved it, and the save: files of different
saves are never merged.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atorch.distributed.barrier_diagnostics import listed
from atorch.errors import CheckpointError, shown
from atorch.files.access import check_source, replacing
from atorch.files.weights import CHECKPOINT, read_weights
from atorch.logs import OF_THIS_RANK, logger
from atorch.smp.checkpointing.states import is_partial, merged
from atorch.smp.ranks import mp_rank, mp_size, pp_size, tp_size
from atorch.smp.session import session

ARRANGED = "_smp_arranged"
"""The key of the arrangement of the saving processes in a partial state."""
SAVE = "save"
"""The key of the save's name in an arrangement."""

# Exceptions of pickling for unsupported objects, such as a lambda.
_UNWRITABLE = (AttributeError, TypeError, torch.serialization.pickle.PicklingError)  # type: ignore[attr-defined]
PLAIN = "tensors, numbers, strings, and lists and dicts of them are plain"
GIVE = (
    f"{PLAIN}: give those, and of what has a state, such as a data loader, its state_dict() or the number of the batch"
)
ADVICE = (
    f"{PLAIN}: save those, or, where you trust the file, name its classes to torch.serialization.add_safe_globals first"
)


@dataclass(frozen=True)
class PartialFiles:
    """The files of a partial checkpoint: their path before and after the process's `mp_rank`."""

    start: str
    end: str = ""

    def path(self, number: int) -> str:
        """The file of the process whose `mp_rank` is `number`."""
        return f"{self.start}{number}{self.end}"

    def write(self, obj: Any, save: str, known_as: PartialFiles | None = None) -> None:
        """Write this process's file.

        Args:
            save: name of the save, equal on all processes.
            known_as: the files that messages name; None for these.

        Raises:
            CheckpointError: the file cannot be written.
        """
        content = _arranged(obj, {**_arrangement(), SAVE: save})
        write_file(content, self.path(mp_rank()), known_as=(known_as or self).path(mp_rank()))

    def read(self, map_location: Any = None, mmap: bool | None = None) -> tuple[Any, str | None]:
        """Read this process's file, or merge all files if the arrangement of processes differs.

        Returns the contents and the name of the save.

        Raises:
            CheckpointError: files are missing, unreadable, of different saves, or incomplete.
        """
        saved = self._saved()
        is_alike = {key: saved.get(key) for key in _arrangement()} == _arrangement()
        numbers = [mp_rank()] if is_alike else range(saved["mp_size"])
        self._need(numbers, saved["mp_size"])
        parts = [read_weights(self.path(number), ADVICE, map_location, mmap) for number in numbers]
        save = self._save_of(dict(zip(numbers, parts, strict=True)), saved["mp_size"])
        parts = [_arranged(part, None) for part in parts]
        return parts[0] if is_alike else merged(parts, shown(self.start)), save

    def _save_of(self, read: Mapping[int, Any], size: int) -> str | None:
        """The save of all files: of those that were read, and of any others that exist."""
        others = sorted(set(self.numbers()) & set(range(size)) - set(read))
        number_of: dict[Any, int] = {}
        for number, part in (*read.items(), *((other, self._glance(other)) for other in others)):
            for arrangement in _arrangements(part):
                number_of.setdefault(arrangement.get(SAVE), number)
        if len(number_of) > 1:
            paths = " and ".join(shown(self.path(number)) for number in sorted(number_of.values()))
            raise CheckpointError(
                f"{paths} are of different saves, of which one was not finished; load another checkpoint, or, where "
                "processes are saving it, call smp.barrier() first"
            )
        return next(iter(number_of), None)

    def numbers(self) -> list[int]:
        """The numbers of the existing files."""
        path = Path(self.path(0)).parent
        names = (str(path / file.name) for file in path.iterdir()) if path.is_dir() else ()
        start, end = re.escape(str(path / Path(f"{self.start}0").name[:-1])), re.escape(self.end)
        matches = (re.fullmatch(rf"{start}(0|[1-9]\d*){end}", name) for name in names)
        return sorted(int(match[1]) for match in matches if match is not None)

    def _saved(self) -> Mapping[str, Any]:
        """The arrangement of the saving processes; if no state records it, the current one if it fits the files."""
        numbers = self.numbers()
        if not numbers:
            raise CheckpointError(f"there is no partial checkpoint {shown(self.path(mp_rank()))}")
        # Every save writes file 0; higher numbers may be left over from a save of more processes.
        number = 0 if 0 in numbers else mp_rank() if mp_rank() in numbers else numbers[0]
        for saved in _arrangements(self._glance(number)):
            if type(saved.get("mp_size")) is not int or saved["mp_size"] < 1:
                raise CheckpointError(
                    f"{shown(self.path(number))} says its processes were arranged as {shown(saved)}; save it again"
                )
            return saved
        current = _arrangement()
        return current if len(numbers) == current["mp_size"] else {"mp_size": len(numbers)}

    def _glance(self, number: int) -> Any:
        """The contents of a file, memory-mapped if possible, so that tensors are read lazily."""
        path = self.path(number)
        check_source(path, CHECKPOINT)
        return read_weights(path, ADVICE, mmap=zipfile.is_zipfile(path))

    def _need(self, numbers: Sequence[int], size: int) -> None:
        missing = [number for number in numbers if not Path(self.path(number)).exists()]
        if missing:
            raise CheckpointError(
                f"a partial checkpoint has the {size} files {shown(self.path(0))} to {size - 1}, of which "
                f"{listed(missing)} are not there; copy them beside the others, or load another checkpoint"
            )


def write_file(obj: Any, path: str, *, is_refused: bool = False, known_as: str = "") -> None:
    """Write one file atomically. If it could not be loaded, log a warning, or with `is_refused` raise.

    known_as: the path in messages; by default `path`.

    Raises:
        CheckpointError: it cannot be written, or could not be loaded; an existing file stays.
    """
    quoted = shown(known_as or path)
    with replacing(path, CHECKPOINT) as file:
        try:
            torch.save(obj, file)
        except _UNWRITABLE as error:
            raise CheckpointError(f"{quoted} cannot be written: {error}; {GIVE}") from error
        file.flush()
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


def _arranged(obj: Any, arrangement: Mapping[str, Any] | None) -> Any:
    """Set the arrangement in all partial states of an object, at any depth of dicts; None removes it."""
    if is_partial(obj):
        plain = {key: value for key, value in obj.items() if key != ARRANGED}
        return plain if arrangement is None else {**plain, ARRANGED: dict(arrangement)}
    if type(obj) is dict:
        return {key: _arranged(value, arrangement) for key, value in obj.items()}
    return obj


def _arrangements(obj: Any) -> Iterator[Mapping[str, Any]]:
    """The arrangements in the partial states of a file's contents."""
    if is_partial(obj) and isinstance(obj.get(ARRANGED), dict):
        yield obj[ARRANGED]
    elif type(obj) is dict:
        for value in obj.values():
            yield from _arrangements(value)
