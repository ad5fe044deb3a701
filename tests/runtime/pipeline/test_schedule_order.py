"""What torch's schedules have processes do, and how long they wait with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import StrategyError
from atorch.report.schedule import expected_bubble, timeline
from atorch.runtime.data_parallel.gradient_sync import Reduction
from atorch.runtime.pipeline.schedules import PassKind, StagePass, make_schedule, order, stages_of, torch_stage
from atorch.runtime.pipeline.stand_ins import shape_of
from tests.pool import Pool

SIZES = [(2, 2), (2, 6), (4, 4), (4, 16), (8, 16)]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]


def letters(passes: list[StagePass]) -> str:
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
        stage: Any = torch_stage(schedule, layer, Reduction(layer), index, size * pieces, *ends, cpu, group)  # type: ignore[arg-type]
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


def test_what_torch_refuses_is_told_with_what_holds() -> None:
    told = "7 micro-batches do not go with the schedule zero_bubble on 3 processes; give a multiple of 3"
    with pytest.raises(StrategyError, match=told):
        order("zero_bubble", 3, 7)


def test_one_process_waits_for_nobody() -> None:
    for schedule, pieces in SCHEDULES:
        assert timeline(order(schedule, 1, 4, pieces)).bubble == 0.0
