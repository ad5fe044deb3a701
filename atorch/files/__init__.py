"""Files read and written safely by user-given paths: bounded reads of regular files, and atomic writes.

A path may name a pipe or a device: a read could block forever, and a replacement would destroy it. So only regular
files are read or replaced. Links are followed, and stay links.
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

from atorch.errors import ArgumentError, AtorchError, shown

AnyPath = str | os.PathLike[str]

_SPECIAL: Mapping[str, str] = {"d": "a directory", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}


@dataclass(frozen=True)
class FileKind:
    """The kind of a file: its name in errors, the error class, and the size limit."""

    name: str
    error: type[AtorchError]
    max_bytes: int = 2**20


FILE = FileKind("file", ArgumentError)


def read_bytes(path: AnyPath, kind: FileKind) -> bytes:
    """Read a regular file.

    Raises:
        AtorchError: of class `kind.error`: the file is missing, unreadable, not regular, or too large.
    """
    check_source(path, kind)
    # The file may have changed since the check; a non-blocking open of a pipe does not wait for a writer.
    with _reporting(path, kind, "read") as quoted, open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        _refuse_special(quoted, status, kind)
        data = b"" if status.st_size > kind.max_bytes else file.read(kind.max_bytes + 1)
        if max(len(data), status.st_size) > kind.max_bytes:
            raise kind.error(f"{quoted}: more than {kind.max_bytes:,} bytes; a {kind.name} is smaller")
    return data


def write(path: AnyPath, content: str | bytes, kind: FileKind = FILE) -> None:
    """Write a regular file atomically: a reader sees the old one or the new one.

    Characters without a form in UTF-8 become question marks.

    Raises:
        AtorchError: of class `kind.error`: it cannot be written, or the path names something else than a regular file.
    """
    with replacing(path, kind) as file:
        file.write(content.encode(errors="replace") if isinstance(content, str) else content)


@contextmanager
def replacing(path: AnyPath, kind: FileKind) -> Iterator[BinaryIO]:
    """Open a file that replaces `path`, with the old one's permissions, at the end of the block.

    If the block raises, the old file stays.

    Raises:
        AtorchError: of class `kind.error`, as `write`.
    """
    with _reporting(path, kind, "written") as quoted:
        status = _replaceable(path, quoted, kind)
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
    """Refuse a path to read from that does not name a regular file.

    Raises:
        AtorchError: of class `kind.error`.
    """
    with _reporting(path, kind, "read") as quoted:
        _refuse_special(quoted, os.stat(path), kind)


def check_target(path: AnyPath, kind: FileKind = FILE) -> None:
    """Refuse a path that `write` would refuse, before its content is computed.

    Raises:
        AtorchError: of class `kind.error`.
    """
    with _reporting(path, kind, "written") as quoted:
        _replaceable(path, quoted, kind)
        folder = os.path.dirname(os.path.realpath(path))
        if not os.path.isdir(folder):
            raise OSError(errno.ENOENT, f"it is in no folder that is there; make {folder!r} first")
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, f"no file can be made in {folder!r}; give another path")


@contextmanager
def _reporting(path: AnyPath, kind: FileKind, done: Literal["read", "written"]) -> Iterator[str]:
    """Yield the path as errors quote it, and convert OSErrors of the block to `kind.error`."""
    try:
        quoted, has_nul = shown(os.fspath(path)), b"\0" in os.fsencode(path)
    except TypeError:
        raise kind.error(f"{shown(path)} is not a path; give the path of a {kind.name}") from None
    except UnicodeEncodeError as error:
        raise kind.error(f"{shown(path)} is not a file name: {error}") from None
    if has_nul:
        raise kind.error(f"{quoted} is not a file name: it holds a NUL")
    try:
        yield quoted
    except OSError as error:
        if done == "read" and isinstance(error, FileNotFoundError):
            raise kind.error(f"there is no {kind.name} {quoted}") from None
        raise kind.error(f"the {kind.name} {quoted} cannot be {done}: {error.strerror}") from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def _refuse_special(quoted: str, status: os.stat_result, kind: FileKind) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = _SPECIAL.get(stat.filemode(status.st_mode)[0], "something else")
        raise kind.error(f"{quoted} is {what}, no ordinary file; give the path of a {kind.name}")


def _replaceable(path: AnyPath, quoted: str, kind: FileKind) -> os.stat_result | None:
    """The status of the file to be replaced; None if there is none."""
    if not os.path.basename(os.fspath(path)):
        raise OSError(errno.EISDIR, "it names no file; give the path of a file")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    _refuse_special(quoted, status, kind)
    if not os.access(path, os.W_OK):
        raise OSError(errno.EACCES, "it must not be written to; change its permissions, or give another path")
    return status


def _keep_permissions(handle: int, status: os.stat_result) -> None:
    if not hasattr(os, "fchown"):
        return  # Windows has other permissions
    if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):  # a failed change of owner does not prevent the write
            os.fchown(handle, status.st_uid, status.st_gid)
    os.chmod(handle, stat.S_IMODE(status.st_mode))
