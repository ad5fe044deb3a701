"""The order of passes of stages that are anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atorch.runtime.pipeline.stage_placement import PlacedSchedule, Turn, by_torch, turns


@st.composite
def placements(draw: st.DrawFn) -> PlacedSchedule:
    size = draw(st.integers(1, 4))
    places = [*range(size), *draw(st.lists(st.integers(0, size - 1), max_size=4))]
    return PlacedSchedule(tuple(draw(st.permutations(places))), draw(st.integers(1, 6)), draw(st.booleans()))


@given(placements(), st.integers(1, 9))
def test_every_pass_comes_once_when_what_it_needs_is_there(placed: PlacedSchedule, count: int) -> None:
    last, waiting = len(placed.places) - 1, turns(placed, count)
    done: set[Turn] = set()
    under_way = most = 0
    while any(waiting):
        # Whoever's next pass has what it needs runs it: where nobody's has, processes would wait for ever.
        ready = [own for own in waiting if own and _needs(own[0], last) <= done]
        assert ready
        turn = ready[0].pop(0)
        assert turn not in done
        done.add(turn)
        if turn.stage == 0:
            under_way += -1 if turn.is_backward else 1
            most = max(most, under_way)
    assert len(done) == 2 * count * (last + 1)
    assert most <= placed.active
    for place, own in enumerate(turns(placed, count)):
        assert {placed.places[turn.stage] for turn in own} == {place}


def _needs(turn: Turn, last: int) -> set[Turn]:
    is_backward, stage, number = turn
    if not is_backward:
        return {Turn(False, stage - 1, number)} if stage else set()
    return {Turn(False, stage, number)} | ({Turn(True, stage + 1, number)} if stage < last else set())


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_in_rounds_all_forward_passes_of_a_round_come_first(size: int, active: int, count: int) -> None:
    for own in turns(PlacedSchedule(tuple(range(size)), active, rounds=True), count):
        for start in range(0, count, active):
            numbers = range(start, min(start + active, count))
            some = [turn.is_backward for turn in own if turn.number in numbers]
            assert some == [False] * len(numbers) + [True] * len(numbers)


def test_a_process_goes_backward_as_soon_as_it_can() -> None:
    first, last = turns(PlacedSchedule((0, 1), 3), 4)
    assert "".join("FB"[turn.is_backward] for turn in last) == "FBFBFBFB"
    assert "".join("FB"[turn.is_backward] for turn in first) == "FFFBFBBB"


def test_torchs_schedules_do_what_a_stage_a_process_in_order_asks_for() -> None:
    in_order = tuple(range(4))
    assert by_torch(PlacedSchedule(in_order, 4), 8) == "1f1b"
    assert by_torch(PlacedSchedule(in_order, 8, rounds=True), 8) == "gpipe"
    for other in (
        PlacedSchedule(in_order, 3),  # fewer under way than 1F1B has
        PlacedSchedule(in_order, 7, rounds=True),
        PlacedSchedule((0, 1, 3, 2), 6),
        PlacedSchedule((0, 1, 2, 1), 6),
    ):
        assert by_torch(other, 8) is other
