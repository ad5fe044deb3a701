"""`atorch visualize schedule`, and that the pictures in the documents are what it draws."""

import re
from pathlib import Path

import pytest

from atorch.cli import main
from tests.house.source import ROOT


def test_a_schedule_is_drawn_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["visualize", "schedule", "--stages", "2", "--micro-batches", "3"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["0 │ F0 F1 ·  ·  B0    F2 B1    ·  B2", "1 │ ·  F0 B0    F1 B1    F2 B2    ·  ·"]
    assert lines[-1] == (
        "1f1b: 2 processes, 3 micro-batches: processes wait for 25.0% of the time (by formula 25.0%), and hold "
        "activations of 2, 1 micro-batches"
    )


def test_pieces_are_for_interleaving_which_has_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["visualize", "schedule", "--schedule", "interleaved", "--stages", "2", "--micro-batches", "2"]) == 0
    assert "2 processes with 2 stages each" in capsys.readouterr().out
    assert main(["visualize", "schedule", "--schedule", "gpipe", "--pieces", "2"]) == 2
    assert "interleave is for the schedule interleaved" in capsys.readouterr().err


def test_what_torch_cannot_schedule_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--schedule", "zero_bubble", "--stages", "3", "--micro-batches", "7"]
    assert main(["visualize", "schedule", *arguments]) == 2
    assert "give a multiple of 3" in capsys.readouterr().err


def test_a_picture_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["visualize", "schedule", "--svg", str(tmp_path / "nowhere" / "drawn.svg")]) == 2
    assert "is in no folder that is there" in capsys.readouterr().err


DRAWN = re.findall(r"^atorch (visualize schedule .*--svg docs/(\S+))$", (ROOT / "docs/pipeline.md").read_text(), re.M)


@pytest.mark.parametrize(("command", "name"), DRAWN)
def test_the_pictures_in_the_documents_are_what_is_drawn(command: str, name: str, tmp_path: Path) -> None:
    *arguments, _ = command.split()
    assert main([*arguments, str(tmp_path / "drawn.svg")]) == 0
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / "docs" / name).read_text()
    assert f"]({name})" in (ROOT / "docs/pipeline.md").read_text()
