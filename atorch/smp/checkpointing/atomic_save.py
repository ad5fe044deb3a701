"""One save of a checkpoint, written beside what its name has, and put in its place once it is whole on all processes.

    .NAME.SAVE.part/  being written; is a folder of the entries that the save consists of
    .NAME.SAVE/       all processes have written: its entries are read instead of those beside it, and are moved there
    .NAME.SAVE.old/   what they have replaced; is read no more

Each step is taken in every folder before the next one is in any, whether machines share a folder or each has its own
(`together` is between them). So where one folder has `.NAME.SAVE`, another's `.NAME.SAVE.part` is whole, and where
neither is, the entries are in place.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atorch.distributed.collectives import gather_objects, together
from atorch.errors import CheckpointError, shown


@dataclass(frozen=True)
class Staged:
    """One save, of this name, under way in a folder."""

    folder: Path
    name: str
    save: str

    @property
    def part(self) -> Path:
        """Its folder while it is written."""
        return self._at(".part")

    @property
    def whole(self) -> Path:
        return self._at("")

    @property
    def old(self) -> Path:
        """The folder of what it has replaced, to be removed."""
        return self._at(".old")

    def _at(self, ending: str) -> Path:
        return self.folder / f".{self.name}.{self.save}{ending}"

    def begin(self) -> bool:
        """Make the folders, and say whether this process is the one that keeps order in this one.

        Raises:
            CheckpointError: they cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.part.mkdir()
                return True
        except OSError as error:
            raise CheckpointError(f"the folder {shown(str(self.folder))} cannot be made: {error.strerror}") from None
        return False

    def commit(self) -> None:
        """Let the save be read, which all have written."""
        with suppress(FileNotFoundError):  # it has gone on
            os.rename(self.part, self.whole)

    def move(self, is_own: Callable[[str], bool]) -> None:
        """Put the entries in their place. `is_own` knows the names in a folder that are the save's to replace."""
        for entry in _names(self.whole):
            there, new = self.folder / entry, self.whole / entry
            _keep_permissions(there, new)
            if new.is_dir() and there.exists():
                for other in _names(there):
                    if not is_own(other) and not (new / other).exists():
                        os.rename(there / other, new / other)  # what a script has put beside goes along
                os.rename(there, self.old)
            os.replace(new, there)
        with suppress(FileNotFoundError):
            self.whole.rmdir()

    def clear(self) -> None:
        """Remove what earlier saves of the name have left, and what this one has replaced."""
        for each in _names(self.folder):
            if _of(self.name, each) and self.folder / each not in (self.part, self.whole):
                remove(self.folder / each)


def whole_saves(folder: Path, name: str) -> list[str]:
    """The saves of a name that are whole on all processes and not in place in some folder; all processes call it."""
    here = together(lambda: [found[1] for each in _names(folder) if (found := _of(name, each)) and not found[2]])
    return sorted({save for saves in gather_objects(here) for save in saves})


def entry_of(folder: Path, name: str, saves: Sequence[str], entry: str) -> Path:
    """The path of an entry of a name's checkpoint. `saves` are those that `whole_saves` gave."""
    staged = [Staged(folder, name, save) for save in saves]
    found = (path for each in staged for path in (each.whole / entry, each.part / entry) if path.exists())
    return next(found, folder / entry)


def settle(own: Staged, keeps_order: bool, is_own: Callable[[str], bool]) -> None:
    """Finish an earlier save of the name that was killed while it was put in its place; all processes call it."""
    earlier = [Staged(own.folder, own.name, save) for save in whole_saves(own.folder, own.name)]
    for each in earlier:
        place(each, keeps_order, is_own)


def place(save: Staged, keeps_order: bool, is_own: Callable[[str], bool]) -> None:
    """Put a save in its place that all processes have written; all call it."""
    _in_order(save.commit, keeps_order)
    _in_order(lambda: save.move(is_own), keeps_order)


def remove(path: Path) -> None:
    """Remove a folder, as far as that can be."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # another machine may share it


def _in_order(step: Callable[[], object], keeps_order: bool) -> None:
    def take() -> None:
        try:
            if keeps_order:
                step()
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint cannot be put in its place: {error.strerror}: {shown(str(error.filename))}"
            ) from None

    together(take)


def _of(name: str, each: str) -> re.Match[str] | None:
    return re.fullmatch(rf"\.{re.escape(name)}\.([0-9a-f]{{16}})(\.part|\.old)?", each)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _keep_permissions(old: Path, new: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):
        shutil.copymode(old, new)
    for each in _names(new):
        _keep_permissions(old / each, new / each)
