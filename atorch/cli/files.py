"""Files that commands write."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write all of `text`.

    Raises:
        ArgumentError: the file cannot be written.
    """
    write_bytes(path, text.encode(errors="replace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write all of `content`.

    Raises:
        ArgumentError: the file cannot be written.
    """
    from atorch.errors import ArgumentError

    try:
        path.write_bytes(content)
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be written: {error.strerror}; give another path") from error


def check_folders(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed for them.

    Raises:
        ArgumentError: a folder is not there.
    """
    from atorch.errors import ArgumentError

    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"{str(path)!r} is in no folder that is there; make {str(path.parent)!r} first")
