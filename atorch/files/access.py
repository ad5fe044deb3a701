"""Files as people name them: read only where they are ordinary and not too long, written whole or not at all.

A path may name anything: a pipe or a device would be read for ever, and replacing one would destroy it. So what is no
ordinary file is refused both ways. Links are followed, and stay links.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from atorch.errors import AtorchError, shown

AnyPath = str | os.PathLike[str]

_SPECIAL: Mapping[str, str] = {"d": "a directory", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}


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
    check_source(path, kind)
    # What is there may have changed since; opening a pipe so does not wait for whoever writes to it.
    with _told(path, kind, "read") as named, open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        _refuse_special(named, status, kind)
        data = b"" if status.st_size > kind.max_bytes else file.read(kind.max_bytes + 1)
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
    with _told(path, kind, "written") as named:
        status = _replaceable(path, named, kind)
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


def check_source(path: AnyPath, kind: FileKind) -> None:
    """Refuse a path to read from that names no ordinary file.

    Raises:
        AtorchError: of `kind.error`.
    """
    with _told(path, kind, "read") as named:
        _refuse_special(named, os.stat(path), kind)


def check_target(path: AnyPath, kind: FileKind) -> None:
    """Refuse a path that `write` would refuse, before anything is computed for it.

    Raises:
        AtorchError: of `kind.error`.
    """
    with _told(path, kind, "written") as named:
        _replaceable(path, named, kind)
        folder = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(folder):
            raise OSError(errno.ENOENT, f"it is in no folder that is there; make {folder!r} first")
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, f"no file can be made in {folder!r}; give another path")


@contextmanager
def _told(path: AnyPath, kind: FileKind, done: Literal["read", "written"]) -> Iterator[str]:
    """The path as an error quotes it; what the system then refuses is told with it."""
    try:
        named, has_nul = shown(os.fspath(path)), b"\0" in os.fsencode(path)
    except TypeError:
        raise kind.error(f"{shown(path)} is no path; give the path of a {kind.name}") from None
    except UnicodeEncodeError as error:
        raise kind.error(f"{shown(path)} is no file name: {error}") from None
    if has_nul:
        raise kind.error(f"{named} is no file name: it holds a NUL")
    try:
        yield named
    except OSError as error:
        if done == "read" and isinstance(error, FileNotFoundError):
            raise kind.error(f"there is no {kind.name} {named}") from None
        raise kind.error(f"the {kind.name} {named} cannot be {done}: {error.strerror}") from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def _refuse_special(named: str, status: os.stat_result, kind: FileKind) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = _SPECIAL.get(stat.filemode(status.st_mode)[0], "something else")
        raise kind.error(f"{named} is {what}, no ordinary file; give the path of a {kind.name}")


def _replaceable(path: AnyPath, named: str, kind: FileKind) -> os.stat_result | None:
    """The status of what is to be replaced; None where nothing is."""
    if not os.path.basename(os.fspath(path)):
        raise OSError(errno.EISDIR, "it names no file; give the path of a file")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    _refuse_special(named, status, kind)
    if not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, "it must not be written to; change its permissions, or give another path")
    return status


def _keep_permissions(handle: int, status: os.stat_result) -> None:
    if not hasattr(os, "fchown"):
        return  # Windows has other ones
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):  # who may not give it away may still write it
            os.fchown(handle, status.st_uid, status.st_gid)
    os.chmod(handle, stat.S_IMODE(status.st_mode))
