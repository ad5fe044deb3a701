"""Files as people name them: read only where they are ordinary and not too long, written whole or not at all.

A path may name anything: a pipe or a device would be read for ever, and replacing one would destroy it. So what is no
ordinary file is refused both ways. Links are followed, and stay links.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atorch.errors import AtorchError, shown

AnyPath = str | os.PathLike[str]

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@dataclass(frozen=True)
class FileKind:
    """The kind of a file: its name in errors, their class, and the most bytes that it may have."""

    name: str
    error: type[AtorchError]
    max_bytes: int = 2**20


def read_bytes(path: AnyPath, kind: FileKind) -> bytes:
    """All that an ordinary file holds.

    Raises:
        AtorchError: of `kind.error`: it is not there, cannot be read, is no ordinary file, or is too long.
    """
    named = _named(path, kind)
    try:
        _refuse_special(path, os.stat(path).st_mode, kind)
        # What is there may have changed since; opening a pipe so does not wait for whoever writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            _refuse_special(path, status.st_mode, kind)
            data = b"" if status.st_size > kind.max_bytes else file.read(kind.max_bytes + 1)
    except FileNotFoundError:
        raise kind.error(f"there is no {kind.name} {named}") from None
    except OSError as error:
        raise kind.error(f"cannot read the {kind.name} {named}: {error.strerror}") from None
    except ValueError as error:  # NUL or half a character
        raise kind.error(f"{named} is no file name: {error}") from None
    if max(len(data), status.st_size) > kind.max_bytes:
        raise kind.error(f"{named}: more than {kind.max_bytes:,} bytes; a {kind.name} is smaller")
    return data


def write(path: AnyPath, content: str | bytes, kind: FileKind) -> None:
    """Write an ordinary file in one piece: a reader sees the old one or the new one.

    Raises:
        AtorchError: of `kind.error`: it cannot be written, or something is there that is no ordinary file.
    """
    with replacing(path, kind) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: AnyPath, kind: FileKind) -> Iterator[BinaryIO]:
    """A file to write to, which is at `path` once the block has ended, with the permissions of what was there.

    Where the block raises, what was there stays.

    Raises:
        AtorchError: of `kind.error`, as `write`.
    """
    try:
        status = _status(path, kind)
        target = os.path.realpath(path)
        scratch = Path(os.path.dirname(target), f".{secrets.token_hex(8)}.tmp")
        try:
            with open(scratch, "xb") as file:
                if status is not None:
                    _keep_permissions(file.fileno(), status)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, kind, error.strerror) from None
    except ValueError as error:
        raise kind.error(f"{_named(path, kind)} is no file name: {error}") from None


def check_source(path: AnyPath, kind: FileKind) -> None:
    """Refuse a path to read from that names no ordinary file.

    Raises:
        AtorchError: of `kind.error`.
    """
    named = _named(path, kind)
    try:
        _refuse_special(path, os.stat(path).st_mode, kind)
    except FileNotFoundError:
        raise kind.error(f"there is no {kind.name} {named}") from None
    except OSError as error:
        raise kind.error(f"cannot read the {kind.name} {named}: {error.strerror}") from None
    except ValueError as error:
        raise kind.error(f"{named} is no file name: {error}") from None


def check_target(path: AnyPath, kind: FileKind) -> None:
    """Refuse a path that `write` would refuse, before anything is computed for it.

    Raises:
        AtorchError: of `kind.error`.
    """
    try:
        _status(path, kind)
        folder = os.path.dirname(os.path.realpath(path))
        is_folder = os.path.isdir(folder)
    except OSError as error:
        raise _unwritable(path, kind, error.strerror) from None
    except ValueError as error:
        raise kind.error(f"{_named(path, kind)} is no file name: {error}") from None
    if not is_folder:
        raise _unwritable(path, kind, f"it is in no folder that is there; make {folder!r} first")
    if not os.access(folder, os.W_OK):
        raise _unwritable(path, kind, f"no file can be made in {folder!r}; give another path")


def _named(path: AnyPath, kind: FileKind) -> str:
    """The path as an error quotes it; raises where it is none."""
    try:
        return shown(os.fspath(path))
    except TypeError:
        raise kind.error(f"{shown(path)} is no path; give the path of a {kind.name}") from None


def _unwritable(path: AnyPath, kind: FileKind, why: str | None) -> AtorchError:
    return kind.error(f"the {kind.name} {_named(path, kind)} cannot be written: {why}")


def _status(path: AnyPath, kind: FileKind) -> os.stat_result | None:
    """The status of what is to be replaced; None where nothing is."""
    _named(path, kind)
    if not os.path.basename(os.fspath(path)):
        raise _unwritable(path, kind, "it names no file; give the path of a file")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    _refuse_special(path, status.st_mode, kind)
    if not os.access(path, os.W_OK):
        raise _unwritable(path, kind, "it must not be written to; change its permissions, or give another path")
    return status


def _refuse_special(path: AnyPath, mode: int, kind: FileKind) -> None:
    if not stat.S_ISREG(mode):
        what = next((name for is_one, name in _KINDS if is_one(mode)), "something else")
        raise kind.error(f"{_named(path, kind)} is {what}, no ordinary file; give the path of a {kind.name}")


def _keep_permissions(handle: int, status: os.stat_result) -> None:
    if hasattr(os, "fchown") and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):  # who may not give it away may still write it
            os.fchown(handle, status.st_uid, status.st_gid)
    os.chmod(handle, stat.S_IMODE(status.st_mode))
