"""What steps take on each process: measured by a clock that the work itself advances, and by the real one."""

import copy
import pickle
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from atorch import StragglerDetector, auto_accelerate
from atorch.errors import ArgumentError
from atorch.runtime.straggler_detector import StepReport, Straggler, behind
from tests.auto.training import messages
from tests.pool import on_ranks

BATCH, WIDTH = 4, 8
Work = Callable[[str], None]


class Counted:
    """A clock that stands still but for the work that is told to it."""

    def __init__(self, takes: Mapping[str, float]) -> None:
        self.time, self.takes = 0.0, takes

    def work(self, part: str) -> None:
        self.time += self.takes.get(part, 0.0)

    def running(self) -> Any:
        """Inside, detectors measure by this clock."""
        return patch("atorch.runtime.straggler_detector.perf_counter", lambda: self.time)


class Net(nn.Module):
    """Blocks that work in forward and in backward."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        self.work("forward")
        if x.requires_grad:
            x.register_hook(lambda _: self.work("backward"))
        return self.last(x)


class Rows(Dataset[Tensor]):
    def __init__(self, num: int, work: Work) -> None:
        self.rows, self.work = torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(1)), work

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        self.work("data")
        return self.rows[index]


def loss_func(batch: Tensor, output: Tensor) -> Tensor:
    return output.square().mean()


def made(work: Work, strategy: Any, steps: int, size: int = 1, **more: Any) -> Any:
    arguments = {"dataloader_args": {"batch_size": BATCH * size}, "optim_args": {"lr": 0.01}, "verify": False, **more}
    data = Rows(BATCH * size * steps, work)
    return auto_accelerate(Net(work), torch.optim.SGD, data, loss_func, load_strategy=strategy, **arguments)[1]


def train(result: Any, passes: int = 1) -> Iterator[int]:
    for number, batch in enumerate(result.dataloader):
        (result.loss_func(batch, result.model(batch)) / passes).backward()
        if number % passes == passes - 1:
            result.optim.step()
            result.optim.zero_grad()
        yield number


def reports(work: Work, strategy: Any, size: int, steps: int, passes: int = 1, **more: Any) -> list[StepReport]:
    told: list[StepReport] = []
    result = made(work, strategy, steps * passes, size)
    with StragglerDetector(result.model, result.optim, on_report=told.append, **more):
        for _ in train(result, passes):
            pass
    return told


def counted(rank: int, size: int, strategy: Any, takes: Any, steps: int = 8, **more: Any) -> list[StepReport]:
    clock = Counted(takes[rank] if isinstance(takes, list) else takes)
    with clock.running():
        return reports(clock.work, strategy, size, steps, **{"every": 4, **more})


EVEN = {"data": 0.25, "forward": 2.0, "backward": 3.0}


@pytest.mark.parametrize("passes", [1, 2])
def test_the_parts_of_a_step_are_what_they_take_over_its_passes(passes: int) -> None:
    told = counted(0, 1, [], EVEN, passes=passes)
    assert [each.step for each in told] == [4, 8]
    for each in told:
        assert each.steps_s == (6.0 * passes,)
        assert each.parts_s == {"data": (1.0 * passes,), "forward": (2.0 * passes,), "backward": (3.0 * passes,)}
        assert not each.stragglers


def test_an_evaluation_counts_as_forward() -> None:
    clock = Counted(EVEN)
    result = made(clock.work, [], 4)
    with clock.running(), StragglerDetector(result.model, result.optim, every=4) as detector:
        for number in train(result):
            if number == 1:
                with torch.no_grad():
                    result.model(torch.ones(1, WIDTH))
    assert detector.report is not None
    assert detector.report.parts_s["forward"] == (pytest.approx(8 / 3),)
    assert detector.report.parts_s["backward"] == (3.0,)


def one_slow(part: str) -> list[dict[str, float]]:
    return [EVEN, EVEN | {part: EVEN[part] + 5.0}, EVEN]


@on_ranks(3)
def test_a_slow_process_is_named_with_its_part_and_even_ones_are_not(rank: int, size: int) -> None:
    for part in (*EVEN, ""):
        told = counted(rank, size, ["ddp"], one_slow(part) if part else EVEN)
        assert bool(told) == (rank == 0), "rank 0 has the report"
        for number, report in enumerate(told, start=1):
            named = [((1,), part, number)] if part else []
            assert [(each.ranks, each.part, each.reports) for each in report.stragglers] == named
        if told and part:
            own, slow = told[1].parts_s[part][:2]
            assert slow == pytest.approx(own + 5.0 * (4 if part == "data" else 1))


class Waiting:
    """Work that takes real time, without computing."""

    def __init__(self, takes: Mapping[str, float]) -> None:
        self.takes = takes

    def __call__(self, part: str) -> None:
        threading.Event().wait(self.takes.get(part, 0.0))


AXES = {"ddp": "data", "zero1": "data", "zero2": "zero", "fsdp": "zero", "tensor_parallel": "tensor"}
SLOW = 0.1


CASES = [  # what one process is slow at, and whether it is named: not where the others wait for it
    ("ddp", "backward", True),
    ("ddp", None, False),
    ("zero1", "forward", True),
    ("zero2", "data", True),
    ("fsdp", "forward", True),
    ("fsdp", "backward", False),
    ("fsdp checkpoint", "backward", False),
    ("tensor_parallel", "data", True),
    ("tensor_parallel", "forward", False),
]


@pytest.mark.slow
@on_ranks()
def test_who_waits_for_a_slow_process_is_not_slow(rank: int, size: int) -> None:
    for method, part, is_named in CASES:
        takes = {each: SLOW / (4 * BATCH if each == "data" else 4) for each in EVEN}
        if part is not None and rank == 1:
            takes[part] += SLOW / (BATCH if part == "data" else 1)
        strategy = [("parallel_mode", ([[AXES[method.split()[0]], 2]], None)), *method.split()]
        passes = 2 if (method, part) == ("ddp", "backward") else 1  # the others wait in every pass
        told = reports(Waiting(takes), strategy, size, 6, passes, every=6, margin=0.2)
        named = [(each.ranks, each.part) for report in told for each in report.stragglers]
        assert named == [((1,), part)] * (is_named and rank == 0), (method, part)


@on_ranks(3)
def test_there_is_one_warning_once_several_reports_agree(rank: int, size: int) -> None:
    with messages() as said:
        counted(rank, size, ["ddp"], one_slow("forward"), every=2, patience=3)
    warnings = [each for each in said if "takes" in each]
    assert len(warnings) == (rank == 0)
    told = r"rank 1 on .* takes 7 s a step for forward, where the median is 2 s, in the last 3 reports"
    assert all(re.search(told, each) for each in warnings)


@on_ranks()
def test_processes_report_at_the_same_steps(rank: int, size: int) -> None:
    result = made(Waiting({}), ["ddp"], 2, size)
    with pytest.raises(ArgumentError) as caught:
        StragglerDetector(result.model, result.optim, every=10 + rank)
    said = str(caught.value)
    assert "is 'every=10, patience=3, margin=0.1' on rank 0 and 'every=11, patience=3, margin=0.1' on rank 1" in said


def test_what_it_cannot_measure_by_is_refused() -> None:
    result = made(Waiting({}), [], 2)
    for given in ({"every": 1}, {"every": 2.5}, {"patience": 0}, {"margin": 0}):
        with pytest.raises(ArgumentError, match="every is a whole number of at least 2, patience is"):
            StragglerDetector(result.model, result.optim, **given)
    with pytest.raises(ArgumentError, match=r"was given a \w+ and a AdamW; give .* result\.model and result\.optim"):
        StragglerDetector(result, torch.optim.AdamW(result.model.parameters()))  # type: ignore[arg-type]


def test_nothing_is_left_once_it_is_over() -> None:
    result = made(Waiting({}), [], 6)

    def hooks() -> list[int]:
        modules = [(each._forward_hooks, each._forward_pre_hooks) for each in result.model.modules()]
        gradients = [each._post_accumulate_grad_hooks or () for each in result.model.parameters()]
        return [len(each) for each in [*chain.from_iterable(modules), *gradients]]

    before = hooks()
    with StragglerDetector(result.model, result.optim, every=3):
        for number in train(result):
            if number == 4:
                break
    assert hooks() == before


def test_a_copy_of_the_model_is_not_measured() -> None:
    clock = Counted(EVEN)
    result = made(clock.work, [], 4)
    with clock.running(), StragglerDetector(result.model, result.optim, every=4) as detector:
        twin = copy.deepcopy(result.model)
        result.model.work = twin.work = None  # which no pickle can hold
        assert pickle.dumps(result.model)
        result.model.work, twin.work = clock.work, Counted({}).work
        for _ in train(result):
            twin(torch.ones(1, WIDTH)).sum().backward()
    assert detector.report is not None
    assert detector.report.parts_s == {"data": (1.0,), "forward": (2.0,), "backward": (3.0,)}


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (
            [("compile", {"backend": "eager", "wrap_class": "Sequential"})],
            {"data": 1.0, "forward": 2.0, "backward": 3.0},
        ),
        ([("chunk", {"budget_bytes": 100_000})], {"data": 1.0, "forward": 2.0}),
        ([("parallel_mode", ([["pipeline", 2]], None)), ("pipeline_parallel", {})], {"data": 2.0}),
    ],
)
@on_ranks()
def test_it_measures_beside_other_methods(rank: int, size: int, strategy: Any, parts: dict[str, float]) -> None:
    clock, told, compiled = Counted(EVEN), list[StepReport](), set[int]()
    result = made(clock.work, strategy, 12, size)

    def tell(report: StepReport) -> None:
        told.append(report)
        compiled.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    with clock.running(), StragglerDetector(result.model, result.optim, on_report=tell, every=4):
        for _ in train(result):
            pass
    if rank == 0:
        assert [{part: each.parts_s[part] for part in parts} for each in told] == [
            {part: (seconds,) * 2 for part, seconds in parts.items()}
        ] * 3
        assert not any(each.stragglers for each in told)
        assert len(compiled) == 1, "hooks that come and go compile nothing again"


def slow(own: list[float], whole: float = 100.0, units: list[int] | None = None, peers: list[int] | None = None):
    size = len(own)
    return behind(own, [whole] * size, 0.1, units or list(range(size)), peers or [0] * size)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([20, 20], {}),
        ([20, 30], {}),  # a tenth of the step, and not more
        ([20, 31], {(1,): (31, 20)}),
        ([20, 20, 20, 50], {(3,): (50, 20)}),
        ([20, 50, 20, 50, 20], {(1,): (50, 20), (3,): (50, 20)}),
        ([1, 20, 20, 20], {}),  # one that is quick
        ([0, 15, 30, 45, 60, 75], {}),  # all differ: none stands out
        ([0], {}),
    ],
)
def test_who_stands_out_of_the_median(own, expected):
    assert slow(own) == expected


def test_times_that_vary_name_nobody_and_one_far_outside_is_named():
    draw = random.Random(0)
    for _ in range(20):
        own = [draw.gauss(50, 10) for _ in range(512)]
        assert len(slow(own)) <= 1, "four standard deviations: one of 30,000"
        own[77] += 100
        assert (77,) in slow(own)


def test_who_waits_or_has_other_work_is_not_slow():
    """Rank 0 came late, and rank 1 waited for it: the time of the one that did not wait is that of both."""
    assert slow([20, 50, 20, 20], units=[0, 0, 2, 2]) == {}
    assert slow([50, 50, 20, 20], units=[0, 0, 2, 2]) == {(0, 1): (50, 20)}
    assert slow([50, 90], units=[0, 0]) == {}
    assert slow([20, 20, 50, 50], peers=[0, 0, 1, 1]) == {}
    assert slow([20, 20, 50, 70], peers=[0, 0, 1, 1]) == {(3,): (70, 50)}


def test_what_is_said():
    several = Straggler(tuple(range(10)), ("a",) * 5 + ("b",) * 5, "forward", 0.05, 0.02, 3)
    assert re.search(r"ranks 0, .* 7, …, .* on a, b takes 50 ms .* forward, .* median is 20 ms", str(several))
    report = StepReport(50, [0.1, 0.1, 0.1], {"data": [0.001, 0.03, 0.002]})
    assert re.search(r"of 3 processes: whole 100 ms / 100 ms / 100 ms, data 1 ms / 2 ms / 30 ms", str(report))
