"""What torch's schedules have processes do, and how long they wait with it."""

from __future__ import annotations

from collections import Counter

import pytest

from atorch.errors import StrategyError
from atorch.report.timeline import expected_bubble, timeline
from atorch.runtime.pipeline.order import Pass, order

SIZES = [(2, 2), (2, 6), (4, 4), (4, 16), (8, 16)]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]


def letters(passes: list[Pass]) -> str:
    return " ".join(f"{each.kind[0]}{each.stage}.{each.micro_batch}" for each in passes)


def test_1f1b_as_everybody_knows_it() -> None:
    first, last = order("1f1b", 2, 3)
    assert letters(first) == "f0.0 f0.1 b0.0 f0.2 b0.1 b0.2"
    assert letters(last) == "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"


@pytest.mark.parametrize(("schedule", "pieces"), SCHEDULES)
@pytest.mark.parametrize(("processes", "micro_batches"), SIZES)
def test_all_is_done_once_and_processes_wait_as_formulas_say(
    schedule: str, pieces: int, processes: int, micro_batches: int
) -> None:
    found = order(schedule, processes, micro_batches, pieces)
    kinds = ["forward", "input", "weight"] if schedule == "zero_bubble" else ["forward", "backward"]
    assert Counter(each for passes in found for each in passes) == Counter(
        Pass(kind, stage, number)  # type: ignore[arg-type]
        for kind in kinds
        for stage in range(processes * pieces)
        for number in range(micro_batches)
    )
    drawn = timeline(found)
    assert [drawn.stages(process) for process in range(processes)] == [
        list(range(process, processes * pieces, processes)) for process in range(processes)
    ]
    assert drawn.bubble == pytest.approx(expected_bubble(schedule, processes, micro_batches, pieces))


def test_what_torch_refuses_is_told_with_what_holds() -> None:
    told = "7 micro-batches do not go with the schedule zero_bubble on 3 processes; give a multiple of 3"
    with pytest.raises(StrategyError, match=told):
        order("zero_bubble", 3, 7)


def test_one_process_waits_for_nobody() -> None:
    for schedule, pieces in SCHEDULES:
        assert timeline(order(schedule, 1, 4, pieces)).bubble == 0.0
