"""Schedules on a terminal and as pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from atorch.report.schedule import PassId, Timeline, schedule_svg, schedule_text, timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def drawn() -> Timeline:
    """Two processes, two micro-batches, backward in two parts on the second."""
    order: list[list[PassId]] = [
        [("forward", 0, 0), ("forward", 0, 1), ("backward", 0, 0), ("backward", 0, 1)],
        [("forward", 1, 0), ("input", 1, 0), ("forward", 1, 1), ("input", 1, 1), ("weight", 1, 0), ("weight", 1, 1)],
    ]
    return timeline(order)


@pytest.fixture
def interleaved() -> Timeline:
    """Two stages on one process."""
    return timeline([[("forward", 0, 0), ("forward", 1, 0), ("backward", 1, 0), ("backward", 0, 0)]])


def test_a_terminal_shows_letters_and_micro_batches_at_their_times(drawn: Timeline) -> None:
    lines = [line.rstrip() for line in schedule_text(drawn, 80).plain.splitlines()]
    assert lines[:2] == ["0 │ F0 F1 ·  B0    B1", "1 │ ·  F0 I0 F1 I1 W0 W1"]
    assert lines[-1] == " F  forward    B  backward    I  backward for inputs    W  backward for weights"


def test_a_narrow_terminal_gets_staves(drawn: Timeline) -> None:
    lines = [line.rstrip() for line in schedule_text(drawn, 16).plain.splitlines()]
    assert lines[:5] == ["0 │ F0 F1 ·  B0", "1 │ ·  F0 I0 F1", "", "0 │    B1", "1 │ I1 W0 W1"]
    assert max(map(len, lines[:5])) <= 16
    assert schedule_text(drawn, 1).plain.count("0 │") == drawn.num_ticks


def test_stages_of_one_process_have_small_letters(interleaved: Timeline) -> None:
    assert schedule_text(interleaved, 80).plain.startswith("0 │ F0a F0b B0b     B0a")


def test_the_picture_has_every_pass_where_and_as_long_as_it_is(drawn: Timeline) -> None:
    picture = ElementTree.fromstring(schedule_svg(drawn, "1f1b <on> 2 & 2"))
    assert picture.findtext(f"{SVG}title") == "1f1b <on> 2 & 2"
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    passes = [each for placed in drawn.processes for each in placed]
    assert len(boxes) == len(passes)
    left, tick = float(boxes[0].get("x", "")), float(boxes[1].get("x", "")) - float(boxes[0].get("x", ""))
    for box, each in zip(boxes, passes, strict=True):
        assert float(box.get("x", "")) == left + tick * each.start
        assert float(box.get("width", "")) == tick * (each.end - each.start) - 1
        assert f"of micro-batch {each.micro_batch} on stage {each.stage}" in (box.findtext(f"{SVG}title") or "")
    assert len({box.get("fill") for box in boxes}) == 3  # a backward pass is as one for inputs, and has its length
    assert float(picture.get("width", "")) >= left + tick * drawn.num_ticks


def test_the_picture_needs_nothing_else_and_has_a_dark_mode(drawn: Timeline) -> None:
    text = schedule_svg(drawn, "title")
    assert "prefers-color-scheme: dark" in text
    assert text.count("http") == 1  # the name of the format
    assert "<script" not in text


def test_later_stages_of_a_process_are_lighter(interleaved: Timeline) -> None:
    picture = ElementTree.fromstring(schedule_svg(interleaved, "title"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    first, second, *_ = (sum(bytes.fromhex(box.get("fill", "")[1:])) for box in boxes)
    assert second > first
    assert "lighter: later stages" in "".join(picture.itertext())
