"""An atomic save of a checkpoint: written to a staging folder, moved in place once it is whole on all processes.

    .NAME.SAVE.part/  being written: a folder with the entries of the save
    .NAME.SAVE/       written by all processes: readers prefer its entries, which then move to the parent folder
    .NAME.SAVE.old/   the replaced entries, which nothing reads

Machines may share one folder or have one each. All folders complete a step (`all_or_none`) before any begins the next.
So if one folder has `.NAME.SAVE`, the `.NAME.SAVE.part` of another is whole, and if neither exists, the entries are in
place.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atorch.checkpoint.shard_file import reporting
from atorch.distributed.collectives import all_or_none, gather_objects
from atorch.errors import shown


@dataclass
class Staged:
    """A save of a name in progress in a folder."""

    folder: Path
    name: str
    save: str
    keeps_order: bool = False
    """True on the one process per folder that moves and removes files."""

    @property
    def part(self) -> Path:
        """The staging folder during the write."""
        return self._at(".part")

    def _at(self, ending: str) -> Path:
        return self.folder / f".{self.name}.{self.save}{ending}"

    def begin(self) -> None:
        """Create the folders.

        Raises:
            CheckpointError: they cannot be created.
        """
        with reporting(f"the folder {shown(str(self.folder))} cannot be made"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.part.mkdir()
                self.keeps_order = True

    def place(self) -> None:
        """Move the entries to their place, after all processes have written. All processes call it.

        Raises:
            CheckpointError: they cannot be moved.
        """
        for step in (self._commit, self._move):
            all_or_none(step if self.keeps_order else lambda: None)

    def _commit(self) -> None:
        """Make the save readable."""
        with self._reporting(), suppress(FileNotFoundError):  # renamed already
            os.rename(self.part, self._at(""))

    def _move(self) -> None:
        whole = self._at("")
        with self._reporting():
            for entry in _names(whole):
                target, new = self.folder / entry, whole / entry
                _keep_permissions(target, new)
                if new.is_dir() and target.exists():
                    for other in _names(target):
                        if not is_saved(other) and not (new / other).exists():
                            os.rename(target / other, new / other)  # keeps files that a script has added
                    os.rename(target, self._at(".old"))
                os.replace(new, target)
            with suppress(FileNotFoundError):
                whole.rmdir()

    def _reporting(self) -> AbstractContextManager[None]:
        return reporting(f"the checkpoint {self.name} in {shown(str(self.folder))} cannot be put in its place")

    def clear(self) -> None:
        """Remove leftovers of earlier saves of the name, and the entries that this one replaced."""
        for entry in _names(self.folder):
            if _match(self.name, entry) and self.folder / entry not in (self.part, self._at("")):
                remove(self.folder / entry)


def whole_saves(folder: Path, name: str) -> list[str]:
    """The saves of a name that all processes have written, but not all have moved; all processes call it."""
    matches = all_or_none(lambda: [_match(name, entry) for entry in _names(folder)])
    here = [match[1] for match in matches if match and not match[2]]  # group 2 marks a save in progress, or an old one
    return sorted({save for saves in gather_objects(here) for save in saves})


def entry_of(folder: Path, name: str, saves: Sequence[str], entry: str) -> Path:
    """The current path of a checkpoint's entry. `saves` come from `whole_saves`."""
    staged = [Staged(folder, name, save) for save in saves]
    paths = (path for save in staged for path in (save._at("") / entry, save.part / entry) if path.exists())
    return next(paths, folder / entry)


def settle(staged: Staged) -> None:
    """Finish earlier saves of the name that were killed during the move; all processes call it."""
    for save in whole_saves(staged.folder, staged.name):
        replace(staged, save=save).place()


def is_saved(name: str) -> bool:
    """True if a save writes a file of this name in a partial checkpoint's folder."""
    return bool(re.fullmatch(r"(model|optimizer)_\d+\.pt|user_content\.pt|\.[0-9a-f]{16}\.tmp", name))


def remove(path: Path) -> None:
    """Remove a folder or a link, ignoring errors of the removal."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # another machine may remove it, too


def _match(name: str, entry: str) -> re.Match[str] | None:
    return re.fullmatch(rf"\.{re.escape(name)}\.([0-9a-f]{{16}})(\.part|\.old)?", entry)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _keep_permissions(old: Path, new: Path) -> None:
    with suppress(FileNotFoundError, PermissionError):
        shutil.copymode(old, new)
    for entry in _names(new):
        _keep_permissions(old / entry, new / entry)
