"""JSON under limits: one reader for all files that people may be given."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atorch.auto.planner.dry_runs.time_budget import Calibration
from atorch.auto.sources.config import job_of
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError, AtorchError, CheckpointError, StrategyError
from atorch.files.strict_json import Format, parse, read_json
from atorch.patrickstar.profiler import Profile
from tests.auto.planner.jobs import cluster

FORM = Format("note", ArgumentError, max_bytes=200, max_depth=3, max_values=10, max_string=8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" + "1," * 9 + "1]", "more than 10 values; a note has fewer"),
        ('["123456789"]', r"\$\[0\]: a string of 9 characters; one has at most 8"),
        ("[[[[1]]]]", r"\$\[0\]\[0\]\[0\]: nested deeper than 3 levels"),
        ('{"a": 1, "a": 2}', r"\$\.a: the key is there twice"),
        ("[NaN]", r"\$\[0\]: nan is not a JSON number"),
        ("[-1e999]", r"\$\[0\]: -inf is not a JSON number"),
        ("[9223372036854775808]", r"\$\[0\]: an integer beyond"),
        (f"[0.{'9' * 99}]", r"\$\[0\]: a number of 101 characters"),
        ('{"123456789": 1}', r"a key of \$: a string of 9 characters"),
        ('["\\ud800"]', r"\$\[0\]: '\\ud800' is half a character"),
        ("[1 2]", "line 1 column 4: Expecting ',' delimiter"),
        (" " * 201, "more than 200 bytes; a note is smaller"),
        (b"\xff", "byte 0 is not UTF-8"),
    ],
)
def test_limits_are_those_of_the_format(text: str | bytes, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        parse(text, FORM)


def test_infinity_where_it_is_allowed() -> None:
    form = Format("note", ArgumentError, allows_infinity=True)
    assert parse("[0.0, Infinity]", form) == [0.0, float("inf")]
    with pytest.raises(ArgumentError, match="nan is not a JSON number"):
        parse("[NaN]", form)


def test_the_path_is_told(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text("[1")
    with pytest.raises(ArgumentError, match=r"note\.json': line 1 column 3: .*cut short"):
        read_json(path, FORM)
    path.write_text("[1]")
    assert read_json(path, FORM) == [1]


READERS: list[tuple[Callable[[Path], Any], type[AtorchError], int]] = [
    (Strategy.of, StrategyError, 2**20),
    (lambda path: ClusterSpec.load(str(path)), ArgumentError, 2**20),
    (Profile.load, CheckpointError, 2**26),
    (lambda path: job_of(path, 16), ArgumentError, 2**24),
]
NAMES = ["strategy", "cluster", "profile", "config"]


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def long_text(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"format": "')
        file.truncate(3 * 10**8)  # what follows is zeros, and is not there
        file.seek(0, os.SEEK_END)
        file.write(b'"}')


def written(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


BAD = [
    (os.mkfifo, "is a pipe, no ordinary file"),
    (zeros, "is a device, no ordinary file"),
    (Path.mkdir, "is a directory, no ordinary file"),
    (long_text, "more than [0-9,]+ bytes"),
    (written('{"a":' * 50_000 + "1" + "}" * 50_000), "nested deeper than"),
    (written('{"device": 1, "device": 2}'), "the key is there twice"),
    (written('{"device": NaN}'), "nan is not a JSON number"),
    (written(json.dumps({"device": "a" * 70_000})), "a string of 70,000 characters; one has at most 8,192"),
    (written(f'{{"device": {"9" * 5000}}}'), "a number of 5000 characters"),
    (written(""), "cut short"),
    (lambda path: path.write_bytes(b"\x80\x04]"), "not UTF-8|pickle"),
]


@pytest.mark.parametrize(("make", "told"), BAD)
@pytest.mark.parametrize(("read", "kind", "most"), READERS, ids=NAMES)
def test_every_reader_refuses_the_same(
    read: Callable[[Path], Any], kind: type[AtorchError], most: int, make: Any, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "given.json"
    make(path)
    with pytest.raises(kind, match=told) as caught:
        read(path)
    assert "given.json" in str(caught.value)
    assert len(str(caught.value)) < 600
    assert "more than" not in str(caught.value) or f"{most:,} bytes" in str(caught.value)


@pytest.mark.parametrize(("make", "told"), [each for each in BAD if each[0] is not Path.mkdir])
def test_a_calibration_that_cannot_be_read_is_told_and_begun_anew(
    make: Any, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "given.json"
    make(path)
    assert Calibration(path, {}).read() == ()
    assert "given.json is ignored, and a new one begun" in caplog.text
    assert re.search(told, caplog.text)
    assert Calibration.of(str(path), cluster(), {}) is not None
