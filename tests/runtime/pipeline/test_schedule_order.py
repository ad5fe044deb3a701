"""Schedules: the passes of each process, how long it waits, and which backward passes come apart."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from atorch.errors import StrategyError
from atorch.report.schedule import expected_bubble, timeline
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.pipeline.placeholders import shape_of
from atorch.runtime.pipeline.schedules import (
    PassKind,
    StagePass,
    TorchStage,
    comes_apart,
    make_schedule,
    order,
    stages_of,
)
from atorch.runtime.pipeline.stage_placement import PassSlot, PlacedSchedule, by_torch, turns
from tests.pool import Pool


@st.composite
def placements(draw: st.DrawFn) -> PlacedSchedule:
    size = draw(st.integers(1, 4))
    places = [*range(size), *draw(st.lists(st.integers(0, size - 1), max_size=4))]
    return PlacedSchedule(tuple(draw(st.permutations(places))), draw(st.integers(1, 6)), draw(st.booleans()))


@given(placements(), st.integers(1, 9))
def test_every_pass_comes_once_when_what_it_needs_is_there(placed: PlacedSchedule, count: int) -> None:
    last, waiting = len(placed.places) - 1, turns(placed, count)
    done: set[PassSlot] = set()
    under_way = most = 0
    while any(waiting):
        # Whoever's next pass has what it needs runs it: where nobody's has, processes would wait forever.
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


def _needs(turn: PassSlot, last: int) -> set[PassSlot]:
    is_backward, stage, number = turn
    if not is_backward:
        return {PassSlot(False, stage - 1, number)} if stage else set()
    return {PassSlot(False, stage, number)} | ({PassSlot(True, stage + 1, number)} if stage < last else set())


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


WIDTH = 4
Way = Callable[["Stage", Tensor], list[Tensor]]


class Stage(nn.Module):
    """A way through weights that can be used in several places."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.way(self, x)


def positions(stage: Stage, x: Tensor) -> list[Tensor]:
    """A bias that is made of a weight alone and added in two places, as T5's."""
    bias = stage.experts[0].sin()
    return [stage.second((stage.first(x) + bias).tanh()) + bias]


WAYS: Mapping[str, Way] = {
    "once": lambda stage, x: [x + stage.second(stage.first(x).tanh())],
    "side by side": lambda stage, x: [stage.first(x @ stage.experts[0] + x.tanh() @ stage.experts[1])],
    "one after the other": lambda stage, x: [stage.first(stage.second(stage.first(x).tanh()))],
    "positions": positions,
    "beside the input": lambda stage, x: [stage.first(x), stage.second(torch.ones(WIDTH, WIDTH))],
}


def gradients(stage: Stage, x: Tensor, halves: bool) -> dict[str, Tensor | None]:
    outputs = stage(x)
    ones = list(map(torch.ones_like, outputs))
    if halves:
        _, groups = stage_backward_input(outputs, ones, [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        torch.autograd.backward(outputs, ones)
    return {"x": x.grad} | {name: each.grad for name, each in stage.named_parameters()}


def made(way: str) -> tuple[Stage, Tensor]:
    torch.manual_seed(0)
    return Stage(WAYS[way]), torch.randn(WIDTH, WIDTH, requires_grad=True)


def test_an_output_that_was_let_go_is_known_by_its_edge() -> None:
    for way in ("once", "one after the other"):
        stage, x = made(way)
        edges = [get_gradient_edge(output) for output in stage(x)]
        assert comes_apart(edges, [x], stage.parameters()) == (way == "once")


@pytest.mark.parametrize("way", ["once", "side by side"])
def test_halves_are_the_whole(way: str) -> None:
    stage, x = made(way)
    assert comes_apart(stage(x), [x, torch.ones(1), "text"], stage.parameters())
    torch.testing.assert_close(gradients(stage, x, True), gradients(*made(way), False))


@pytest.mark.parametrize("way", ["one after the other", "positions", "beside the input"])
def test_what_torch_would_lose_stays_whole(way: str) -> None:
    stage, x = made(way)
    assert not comes_apart(stage(x), [x], stage.parameters())
    expected = gradients(*made(way), False)
    try:
        got = gradients(stage, x, True)
    except RuntimeError:  # backward through the graph a second time
        return
    assert any(
        grad is not None and (got[name] is None or not torch.allclose(got[name], grad))
        for name, grad in expected.items()
    )


SIZES = [(2, 2), (2, 6), (4, 4), (4, 16), (8, 16)]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]


def letters(passes: list[StagePass]) -> str:
    return " ".join(f"{each.kind[0]}{each.stage}.{each.micro_batch}" for each in passes)


def test_1f1b_one_process_and_what_torch_refuses() -> None:
    first, last = order("1f1b", 2, 3)
    assert letters(first) == "f0.0 f0.1 b0.0 f0.2 b0.1 b0.2"
    assert letters(last) == "f1.0 b1.0 f1.1 b1.1 f1.2 b1.2"
    told = "7 micro-batches do not go with the schedule zero_bubble on 3 processes; give a multiple of 3"
    with pytest.raises(StrategyError, match=told):
        order("zero_bubble", 3, 7)
    for schedule, pieces in SCHEDULES:
        assert timeline(order(schedule, 1, 4, pieces)).bubble == 0.0


@pytest.mark.parametrize(("schedule", "pieces"), SCHEDULES)
@pytest.mark.parametrize(("processes", "micro_batches"), SIZES)
def test_all_is_done_once_and_processes_wait_as_formulas_say(
    schedule: str, pieces: int, processes: int, micro_batches: int
) -> None:
    found = order(schedule, processes, micro_batches, pieces)
    kinds = ["forward", "input", "weight"] if schedule == "zero_bubble" else ["forward", "backward"]
    assert Counter(each for passes in found for each in passes) == Counter(
        StagePass(kind, stage, number)  # type: ignore[arg-type]
        for kind in kinds
        for stage in range(processes * pieces)
        for number in range(micro_batches)
    )
    drawn = timeline(found)
    assert [drawn.stages(process) for process in range(processes)] == [
        list(range(process, processes * pieces, processes)) for process in range(processes)
    ]
    assert drawn.bubble == pytest.approx(expected_bubble(schedule, processes, micro_batches, pieces))


class Layer(nn.Module):
    """The first takes the number of a micro-batch, the last gives a loss."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linear, self.is_last = nn.Linear(1, 1), is_last

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.float().reshape(1, 1))
        return y.sum() if self.is_last else y


def trained(rank: int, size: int, schedule: str, pieces: int, micro_batches: int) -> list[StagePass]:
    """What torch has this process compute in a step."""
    noted: list[StagePass] = []

    def noting(work: Callable[..., Any], kind: Callable[[bool], PassKind], stage: int) -> Callable[..., Any]:
        def noted_work(micro_batch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            noted.append(StagePass(kind(full_backward), stage, micro_batch))
            told = {} if full_backward else {"full_backward": False}
            return work(micro_batch, *args, **told, **kwargs)

        return noted_work

    wire, stages = [(shape_of(torch.zeros(1, 1)), True)], []
    for index in stages_of(rank, size, pieces):
        layer = Layer(index == size * pieces - 1)
        ends = (wire if index else [], [] if layer.is_last else wire)
        cpu, group = torch.device("cpu"), dist.group.WORLD
        stage: Any = TorchStage(schedule, layer, GradientSync(layer), index, size * pieces, *ends, cpu, group)  # type: ignore[arg-type]
        stage.forward_one_chunk = noting(stage.forward_one_chunk, lambda full: "forward", index)
        stage.backward_one_chunk = noting(stage.backward_one_chunk, lambda full: "backward" if full else "input", index)
        stage.backward_weight_one_chunk = noting(stage.backward_weight_one_chunk, lambda full: "weight", index)
        stages.append(stage)
    made = make_schedule(schedule, stages, micro_batches, train=True)
    numbers = torch.arange(micro_batches)
    made.step(*([numbers] if rank == 0 else []), target=numbers, return_outputs=False)
    return noted


@pytest.mark.parametrize(("schedule", "pieces"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_what_is_told_is_done(pool: Pool, schedule: str, pieces: int) -> None:
    assert pool.run(trained, schedule, pieces, 4) == order(schedule, 2, 4, pieces)
