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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from atorch.distributed.collectives import all_or_none, gather_objects
from atorch.errors import CheckpointError, shown


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

    @property
    def whole(self) -> Path:
        return self._at("")

    @property
    def old(self) -> Path:
        """The folder of replaced entries, to be removed."""
        return self._at(".old")

    def _at(self, ending: str) -> Path:
        return self.folder / f".{self.name}.{self.save}{ending}"

    def begin(self) -> None:
        """Create the folders.

        Raises:
            CheckpointError: they cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.part.mkdir()
                self.keeps_order = True
        except OSError as error:
            raise CheckpointError(f"the folder {shown(str(self.folder))} cannot be made: {error.strerror}") from None

    def commit(self) -> None:
        """Make the save readable, after all processes have written."""
        with suppress(FileNotFoundError):  # renamed already
            os.rename(self.part, self.whole)

    def move(self) -> None:
        """Move the entries to their place."""
        for entry in _names(self.whole):
            target, new = self.folder / entry, self.whole / entry
            _keep_permissions(target, new)
            if new.is_dir() and target.exists():
                for other in _names(target):
                    if not is_saved(other) and not (new / other).exists():
                        os.rename(target / other, new / other)  # keeps files that a script has added
                os.rename(target, self.old)
            os.replace(new, target)
        with suppress(FileNotFoundError):
            self.whole.rmdir()

    def clear(self) -> None:
        """Remove leftovers of earlier saves of the name, and the entries that this one replaced."""
        for entry in _names(self.folder):
            if _match(self.name, entry) and self.folder / entry not in (self.part, self.whole):
                remove(self.folder / entry)


def whole_saves(folder: Path, name: str) -> list[str]:
    """The saves of a name that all processes have written, but not all have moved; all processes call it."""
    here = all_or_none(
        lambda: [match[1] for entry in _names(folder) if (match := _match(name, entry)) and not match[2]]
    )
    return sorted({save for saves in gather_objects(here) for save in saves})


def entry_of(folder: Path, name: str, saves: Sequence[str], entry: str) -> Path:
    """The current path of a checkpoint's entry. `saves` come from `whole_saves`."""
    staged = [Staged(folder, name, save) for save in saves]
    paths = (path for save in staged for path in (save.whole / entry, save.part / entry) if path.exists())
    return next(paths, folder / entry)


def settle(own: Staged) -> None:
    """Finish earlier saves of the name that were killed during the move; all processes call it."""
    for save in whole_saves(own.folder, own.name):
        place(replace(own, save=save))


def place(staged: Staged) -> None:
    """Move a save in place that all processes have written; all processes call it."""
    for step in (staged.commit, staged.move):
        all_or_none(partial(_take, step if staged.keeps_order else None))


def is_saved(name: str) -> bool:
    """True if a save writes a file of this name in a partial checkpoint's folder."""
    return bool(re.fullmatch(r"(model|optimizer)_\d+\.pt|user_content\.pt|\.[0-9a-f]{16}\.tmp", name))


def remove(path: Path) -> None:
    """Remove a folder or a link, ignoring errors of the removal."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)  # another machine may remove it, too


def _take(step: Callable[[], object] | None) -> None:
    try:
        if step is not None:
            step()
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint cannot be put in its place: {error.strerror}: {shown(str(error.filename))}"
        ) from None


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
