"""Passes on a simulated clock."""

from __future__ import annotations

import pytest

from atorch.errors import StrategyError
from atorch.report.schedule import PassId, expected_bubble, timeline


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


def test_gradients_of_weights_wait_for_those_of_inputs_and_nobody_for_them() -> None:
    order: list[list[PassId]] = [
        [("forward", 0, 0), ("input", 0, 0), ("weight", 0, 0)],
        [("forward", 1, 0), ("input", 1, 0), ("weight", 1, 0)],
    ]
    first, second = timeline(order).processes
    assert [each.start for each in first] == [0, 3, 4]
    assert [each.start for each in second] == [1, 2, 3]


def test_several_stages_of_a_process_share_it() -> None:
    order: list[list[PassId]] = [
        [("forward", 0, 0), ("forward", 2, 0), ("backward", 2, 0), ("backward", 0, 0)],
        [("forward", 1, 0), ("backward", 1, 0)],
    ]
    drawn = timeline(order)
    assert drawn.stages(0) == [0, 2]
    assert [each.start for each in drawn.processes[0]] == [0, 2, 3, 7]
    assert drawn.most_held(0) == 1.0  # half a micro-batch in each of two stages


def test_an_order_that_waits_for_itself_is_refused() -> None:
    order: list[list[PassId]] = [
        [("forward", 0, 0), ("backward", 0, 0), ("forward", 0, 1), ("backward", 0, 1)],
        [("forward", 1, 0), ("forward", 1, 1), ("backward", 1, 0), ("backward", 1, 1)],
    ]
    with pytest.raises(StrategyError, match="process 0 waits for ever to do backward of micro-batch 0 on stage 0"):
        timeline(order)


def test_what_formulas_say() -> None:
    assert expected_bubble("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert expected_bubble("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert expected_bubble("zero_bubble", 4, 8) == pytest.approx(1 / 9)
    assert expected_bubble("gpipe", 1, 8) == 0.0
    assert timeline(gpipe(4, 8)).bubble == pytest.approx(expected_bubble("gpipe", 4, 8))
