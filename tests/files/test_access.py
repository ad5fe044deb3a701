"""Files: what is not an ordinary one is refused both ways and at once, and what is written is whole or not there."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from atorch.errors import ArgumentError
from atorch.files import FileKind, check_source, check_target, read_bytes, replacing, write

KIND = FileKind("note", ArgumentError, max_bytes=100)


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def linked_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("aim"))
    path.symlink_to(path.with_name("aim"))


SPECIAL = [
    (folder, "a directory"),
    (pipe, "a pipe"),
    (bound, "a socket"),
    (device, "a device"),
    (linked_pipe, "a pipe"),
]


@pytest.mark.parametrize(("make", "what"), SPECIAL)
def test_what_is_no_ordinary_file_is_refused_and_stays(make: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    path = tmp_path / "note"
    make(path)
    before = sorted((each.name, each.lstat().st_mode, each.stat().st_ino) for each in tmp_path.iterdir())
    told = f"note' is {what}, no ordinary file; give the path of a note"
    for use in (lambda: read_bytes(path, KIND), lambda: write(path, "text", KIND), lambda: check_target(path, KIND)):
        with pytest.raises(ArgumentError, match=told):
            use()
    with pytest.raises(ArgumentError, match=told):
        check_source(path, KIND)
    assert sorted((each.name, each.lstat().st_mode, each.stat().st_ino) for each in tmp_path.iterdir()) == before


def test_a_device_node_is_not_replaced(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a device takes root")
    node = tmp_path / "null"
    try:
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no devices can be made here")
    with pytest.raises(ArgumentError, match="is a device"):
        write(node, "text", KIND)
    assert stat.S_ISCHR(node.stat().st_mode)


def test_too_long_a_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"a" * 100)
    assert len(read_bytes(path, KIND)) == 100
    os.truncate(path, 2**40)  # sparse: nobody could read it
    with pytest.raises(ArgumentError, match=r"note': more than 100 bytes; a note is smaller"):
        read_bytes(path, KIND)


def test_files_are_read_and_written_where_the_system_lacks_the_flags_of_posix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY"):
        monkeypatch.delattr(os, flag)
    write(tmp_path / "note", "a", KIND)
    assert read_bytes(tmp_path / "note", KIND) == b"a"


def test_what_the_system_makes_up_can_be_read() -> None:
    assert read_bytes("/proc/self/comm", KIND)  # whose size is 0


@pytest.mark.parametrize("path", ["none", "none/note", "a\0b", "a" * 5000, "\ud800"])
def test_what_cannot_be_read_is_told(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (lambda: read_bytes(path, KIND), lambda: check_source(path, KIND)):
        with pytest.raises(ArgumentError, match="there is no note|cannot be read|is not a file name"):
            use()


@pytest.mark.parametrize("path", ["none/note", "a\0b", "a" * 5000, "\ud800", "", "note/", "loop"])
def test_what_cannot_be_written_is_told(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for use in (lambda: write(path, "text", KIND), lambda: check_target(path, KIND)):
        with pytest.raises(ArgumentError, match="cannot be written|is not a file name"):
            use()
    assert [each.name for each in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize("path", [None, 3, ["note"]])
def test_what_is_no_path_is_told(path: object) -> None:
    for use in (
        lambda: read_bytes(path, KIND),  # type: ignore[arg-type]
        lambda: check_source(path, KIND),  # type: ignore[arg-type]
        lambda: write(path, "text", KIND),  # type: ignore[arg-type]
        lambda: check_target(path, KIND),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match="is not a path; give the path of a note"):
            use()


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "note", tmp_path / "link"
    link.symlink_to("note")
    write(link, "one", KIND)  # makes what the link names
    path.chmod(0o640)
    write(link, b"two", KIND)
    assert link.is_symlink()
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "note"]
    if os.geteuid() == 0:
        os.chown(path, 1234, 1234)
        write(path, "three", KIND)
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1234)
        return
    path.chmod(0o440)
    with pytest.raises(ArgumentError, match="must not be written to"):
        write(path, "four", KIND)


def test_a_name_may_be_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write(path, "text", KIND)
    assert path.read_text() == "text"


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "note"
    write(path, "old", KIND)

    def fail() -> None:
        with replacing(path, KIND) as file:
            file.write(b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
