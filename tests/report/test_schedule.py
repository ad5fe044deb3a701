"""Passes on a simulated clock; schedules on a terminal and as pictures."""

from xml.etree import ElementTree

import pytest

from atorch.errors import StrategyError
from atorch.report.schedule import PassId, Timeline, expected_bubble, schedule_svg, schedule_text, timeline

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


def gpipe(processes: int, micro_batches: int) -> list[list[PassId]]:
    return [
        [(kind, stage, each) for kind in ("forward", "backward") for each in range(micro_batches)]
        for stage in range(processes)
    ]


def test_passes_start_when_the_process_is_free_and_what_they_need_is_there() -> None:
    drawn = timeline(gpipe(2, 2))
    first, second = ([(each.kind[0], each.start, each.end) for each in placed] for placed in drawn.processes)
    assert first == [("f", 0, 1), ("f", 1, 2), ("b", 5, 7), ("b", 7, 9)]
    assert second == [("f", 1, 2), ("f", 2, 3), ("b", 3, 5), ("b", 5, 7)]
    assert drawn.num_ticks == 9
    assert drawn.bubble == pytest.approx(6 / 18)
    assert [drawn.most_held(process) for process in (0, 1)] == [2, 2]


def test_an_order_that_waits_for_itself_is_refused() -> None:
    order: list[list[PassId]] = [
        [("forward", 0, 0), ("backward", 0, 0), ("forward", 0, 1), ("backward", 0, 1)],
        [("forward", 1, 0), ("forward", 1, 1), ("backward", 1, 0), ("backward", 1, 1)],
    ]
    with pytest.raises(StrategyError, match="process 0 waits forever to do backward of micro-batch 0 on stage 0"):
        timeline(order)


def test_what_formulas_say() -> None:
    assert expected_bubble("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert expected_bubble("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert expected_bubble("zero_bubble", 4, 8) == pytest.approx(1 / 9)
    assert expected_bubble("gpipe", 1, 8) == 0.0
    assert timeline(gpipe(4, 8)).bubble == pytest.approx(expected_bubble("gpipe", 4, 8))
