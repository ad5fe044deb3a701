"""A checkpoint's files, one for each process of a model, and what they come to where processes are arranged otherwise.

The partial states in a file say how the processes were arranged that saved it, and in which save: files of two saves
are not put together.
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
from atorch.smp.checkpointing.partial_states import is_partial, merged
from atorch.smp.ranks import mp_rank, mp_size, pp_size, tp_size
from atorch.smp.session import session

ARRANGED = "_smp_arranged"
"""The key of a partial state in a file that has how the processes were arranged that saved it."""
SAVE = "save"
"""The key of an arrangement that names one save of all processes."""

# What pickling raises for what it cannot, such as a function without a name.
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
    """The files of a partial checkpoint: their path up to the process's `mp_rank`, and after it."""

    start: str
    end: str = ""

    def path(self, number: int) -> str:
        """The file of the process whose `mp_rank` is `number`."""
        return f"{self.start}{number}{self.end}"

    def write(self, obj: Any, save: str, known_as: PartialFiles | None = None) -> None:
        """Write this process's file.

        Args:
            save: names what all processes write together.
            known_as: the files as messages call them; None for these.

        Raises:
            CheckpointError: it cannot be written.
        """
        own = _arranged(obj, {**_arrangement(), SAVE: save})
        write_file(own, self.path(mp_rank()), known_as=(known_as or self).path(mp_rank()))

    def read(self, map_location: Any = None, mmap: bool | None = None) -> tuple[Any, str | None]:
        """The contents of this process's file, or of all put together, where processes are arranged otherwise.

        With it the name of the save.

        Raises:
            CheckpointError: files are missing, cannot be read, are of different saves, or do not make a whole.
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
        """The one save that all files are of: those that were read, and of the others those that are here."""
        others = sorted(set(self.numbers()) & set(range(size)) - set(read))
        named: dict[Any, int] = {}
        for number, part in (*read.items(), *((each, self._glance(each)) for each in others)):
            for arrangement in _arrangements(part):
                named.setdefault(arrangement.get(SAVE), number)
        if len(named) > 1:
            paths = " and ".join(shown(self.path(number)) for number in sorted(named.values()))
            raise CheckpointError(
                f"{paths} are of different saves, of which one was not finished; load another checkpoint, or, where "
                "processes are saving it, call smp.barrier() first"
            )
        return next(iter(named), None)

    def numbers(self) -> list[int]:
        """The numbers of the files that are there."""
        path = Path(self.path(0)).parent
        names = (str(path / each.name) for each in path.iterdir()) if path.is_dir() else ()
        start, end = re.escape(str(path / Path(f"{self.start}0").name[:-1])), re.escape(self.end)
        found = (re.fullmatch(rf"{start}(0|[1-9]\d*){end}", name) for name in names)
        return sorted(int(match[1]) for match in found if match is not None)

    def _saved(self) -> Mapping[str, Any]:
        """The arrangement of the processes that saved; as these are where no partial state says so, if as many files
        are there.
        """
        numbers = self.numbers()
        if not numbers:
            raise CheckpointError(f"there is no partial checkpoint {shown(self.path(mp_rank()))}")
        # The first file is of the last save; of those with higher numbers some may be left from more processes.
        number = 0 if 0 in numbers else mp_rank() if mp_rank() in numbers else numbers[0]
        for found in _arrangements(self._glance(number)):
            if type(found.get("mp_size")) is not int or found["mp_size"] < 1:
                raise CheckpointError(
                    f"{shown(self.path(number))} says its processes were arranged as {shown(found)}; save it again"
                )
            return found
        here = _arrangement()
        return here if len(numbers) == here["mp_size"] else {"mp_size": len(numbers)}

    def _glance(self, number: int) -> Any:
        """The contents of a file, whose tensors are not read until they are looked at."""
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
    """Write one file in one piece. Where it would not be read back, this is said, or with `is_refused` raised.

    known_as: its path as messages call it; by default `path`.

    Raises:
        CheckpointError: it cannot be written, or not be read back; what was there stays.
    """
    named = shown(known_as or path)
    with replacing(path, CHECKPOINT) as file:
        try:
            torch.save(obj, file)
        except _UNWRITABLE as error:
            raise CheckpointError(f"{named} cannot be written: {error}; {GIVE}") from error
        file.flush()
        why = _refusal(file.name)
        if why and is_refused:
            raise CheckpointError(f"{named} could not be loaded again: {why}; {GIVE}")
    if why:
        logger.warning("smp.load will refuse %s: %s; %s", named, why, PLAIN, extra=OF_THIS_RANK)


def _refusal(path: str) -> str:
    """Why a file that torch.save has written would not be read back; "" where it would."""
    try:
        read_weights(path, "", mmap=True)
    except CheckpointError as error:
        return str(error).partition(" cannot be read as weights: ")[2].removesuffix("; ")
    return ""


def _arrangement() -> dict[str, Any]:
    """The arrangement of the processes that hold one model: it says which of them holds what, by its `mp_rank`."""
    stages, slices = pp_size(), tp_size()
    order = session().config.placement.replace("D", "") if stages > 1 and slices > 1 else ""
    return {"mp_size": mp_size(), "pp_size": stages, "tp_size": slices, "order": order}


def _arranged(obj: Any, arrangement: Mapping[str, Any] | None) -> Any:
    """An object whose partial states, at any depth of dicts, say how the processes were arranged; for None do not."""
    if is_partial(obj):
        plain = {key: value for key, value in obj.items() if key != ARRANGED}
        return plain if arrangement is None else {**plain, ARRANGED: dict(arrangement)}
    if type(obj) is dict:
        return {key: _arranged(value, arrangement) for key, value in obj.items()}
    return obj


def _arrangements(obj: Any) -> Iterator[Mapping[str, Any]]:
    """The arrangements in the partial states that a file holds."""
    if is_partial(obj) and isinstance(obj.get(ARRANGED), dict):
        yield obj[ARRANGED]
    elif type(obj) is dict:
        for value in obj.values():
            yield from _arrangements(value)
