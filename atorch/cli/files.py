"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

from atorch.errors import ArgumentError
from atorch.files import access


def write(path: Path, content: str | bytes) -> None:
    """Write all of `content`.

    Raises:
        ArgumentError: the file cannot be written.
    """
    content = content.encode(errors="replace") if isinstance(content, str) else content
    access.write(path, content, access.FileKind("file", ArgumentError))


def check_targets(*paths: Path | None) -> None:
    """Refuse files that cannot be written, before anything is computed for them.

    Raises:
        ArgumentError: a folder does not exist, or a path is no ordinary file.
    """
    for path in paths:
        if path is not None:
            access.check_target(path, access.FileKind("file", ArgumentError))
