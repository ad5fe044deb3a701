"""What steps take on each process: measured by a clock that the work itself advances, and by the real one."""

from __future__ import annotations

import copy
import logging
import pickle
import random
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
from tests.pool import Pool, on_ranks

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


def counted(rank: int, size: int, strategy: Any, takes: Any, steps: int = 8, every: int = 4) -> list[StepReport]:
    clock = Counted(takes[rank] if isinstance(takes, list) else takes)
    with clock.running():
        return reports(clock.work, strategy, size, steps, every=every)


def test_the_parts_of_a_step_are_what_they_take() -> None:
    told = counted(0, 1, [], {"data": 0.25, "forward": 2.0, "backward": 3.0})
    assert [each.step for each in told] == [4, 8]
    for each in told:
        assert each.steps_s == (6.0,)
        assert each.parts_s == {"data": (1.0,), "forward": (2.0,), "backward": (3.0,)}
        assert not each.stragglers


def test_a_loop_that_accumulates_waits_for_the_data_of_every_pass() -> None:
    clock = Counted({"data": 0.25, "forward": 2.0, "backward": 3.0})
    with clock.running():
        (report,) = reports(clock.work, [], 1, 4, passes=2, every=4)
    assert report.steps_s == (12.0,)
    assert report.parts_s == {"data": (2.0,), "forward": (4.0,), "backward": (6.0,)}


def test_an_evaluation_counts_as_forward() -> None:
    clock = Counted({"data": 0.25, "forward": 2.0, "backward": 3.0})
    result = made(clock.work, [], 4)
    with clock.running(), StragglerDetector(result.model, result.optim, every=4) as detector:
        for number in train(result):
            if number == 1:
                with torch.no_grad():
                    result.model(torch.ones(1, WIDTH))
    assert detector.report is not None
    assert detector.report.parts_s["forward"] == (pytest.approx(8 / 3),)
    assert detector.report.parts_s["backward"] == (3.0,)


EVEN = {"data": 0.25, "forward": 2.0, "backward": 3.0}


def one_slow(part: str) -> list[dict[str, float]]:
    return [EVEN, EVEN | {part: EVEN[part] + 5.0}, EVEN]


def counted_by_part(rank: int, size: int) -> dict[str, list[StepReport]]:
    found = {part: counted(rank, size, ["ddp"], one_slow(part)) for part in EVEN}
    return {**found, "": counted(rank, size, ["ddp"], EVEN)}


def test_a_slow_process_is_named_with_its_part_and_even_ones_are_not(pool: Pool) -> None:
    found, *others = pool.run(counted_by_part, ranks=3)
    assert not any(told for other in others for told in other.values()), "rank 0 has the report"
    assert [report.stragglers for report in found.pop("")] == [[], []]
    for part, told in found.items():
        assert [[(each.ranks, each.part, each.reports) for each in report.stragglers] for report in told] == [
            [((1,), part, number)] for number in (1, 2)
        ]
        assert told[1].parts_s[part][1] == pytest.approx(told[1].parts_s[part][0] + 5.0 * (4 if part == "data" else 1))


class Waiting:
    """Work that takes real time, without computing."""

    def __init__(self, takes: Mapping[str, float]) -> None:
        self.takes = takes

    def __call__(self, part: str) -> None:
        threading.Event().wait(self.takes.get(part, 0.0))


AXES = {"ddp": "data", "zero1": "data", "zero2": "zero", "fsdp": "zero", "tensor_parallel": "tensor"}
SLOW = 0.05


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


def real(rank: int, size: int) -> list[list[tuple[Any, str]]]:
    named = []
    for method, part, _ in CASES:
        takes = {each: SLOW / (4 * BATCH if each == "data" else 4) for each in EVEN}
        if part is not None and rank == 1:
            takes[part] += SLOW / (BATCH if part == "data" else 1)
        strategy = [("parallel_mode", ([[AXES[method.split()[0]], 2]], None)), *method.split()]
        passes = 2 if (method, part) == ("ddp", "backward") else 1  # the others wait in every pass
        told = reports(Waiting(takes), strategy, size, 6, passes, every=6, margin=0.2)
        named.append([(each.ranks, each.part) for report in told for each in report.stragglers])
    return named


def test_who_waits_for_a_slow_process_is_not_slow(pool: Pool) -> None:
    assert pool.run(real)[0] == [[((1,), part)] * is_named for _, part, is_named in CASES]


def warned(rank: int, size: int) -> list[str]:
    clock = Counted(one_slow("forward")[rank])
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("atorch")
    logger.addHandler(handler)
    try:
        with clock.running():
            reports(clock.work, ["ddp"], size, 8, every=2, patience=3)
    finally:
        logger.removeHandler(handler)
    return [each for each in said if "takes" in each]


def test_there_is_one_warning_once_several_reports_agree(pool: Pool) -> None:
    (said,), *others = pool.run(warned, ranks=3)
    assert others == [[], []]
    assert "rank 1 on " in said
    assert (
        "takes 7 s a step for forward, where the median is 2 s, in the last 3 reports; the others wait for it" in said
    )


@on_ranks()
def test_processes_report_at_the_same_steps(rank: int, size: int) -> None:
    result = made(Waiting({}), ["ddp"], 2, size)
    with pytest.raises(ArgumentError) as caught:
        StragglerDetector(result.model, result.optim, every=10 + rank)
    said = str(caught.value)
    assert "differs between processes: rank 0 has 'every=10, patience=3, margin=0.1', rank 1 has 'every=11" in said


@pytest.mark.parametrize(("given"), [{"every": 1}, {"every": 2.5}, {"patience": 0}, {"margin": 0}])
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    result = made(Waiting({}), [], 2)
    with pytest.raises(ArgumentError, match="every is a whole number of at least 2, patience is"):
        StragglerDetector(result.model, result.optim, **given)


def test_other_objects_are_refused() -> None:
    result = made(Waiting({}), [], 2)
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


def beside(rank: int, size: int, strategy: Any) -> list[tuple[StepReport, int]]:
    """Each report, with how many graphs had been compiled until then."""
    clock = Counted(EVEN)
    result = made(clock.work, strategy, 12, size)
    told: list[tuple[StepReport, int]] = []
    graphs = torch._dynamo.utils.counters["stats"]

    def tell(report: StepReport) -> None:
        told.append((report, graphs["unique_graphs"]))

    with clock.running(), StragglerDetector(result.model, result.optim, on_report=tell, every=4):
        for _ in train(result):
            pass
    return told


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (
            [("compile", {"backend": "eager", "wrap_class": "Sequential"})],
            {"data": (1.0,) * 2, "forward": (2.0,) * 2, "backward": (3.0,) * 2},
        ),
        ([("chunk", {"budget_bytes": 100_000})], {"data": (1.0,) * 2, "forward": (2.0,) * 2}),
        ([("parallel_mode", ([["pipeline", 2]], None)), ("pipeline_parallel", {})], {"data": (2.0,) * 2}),
    ],
)
def test_it_measures_beside_other_methods(pool: Pool, strategy: Any, parts: Any) -> None:
    told, _ = pool.run(beside, strategy)
    assert [{part: each.parts_s[part] for part in parts} for each, _ in told] == [parts] * 3
    assert not any(each.stragglers for each, _ in told)
    assert len({compiled for _, compiled in told}) == 1, "hooks that come and go compile nothing again"


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


def test_who_waits_in_the_midst_of_its_work_is_not_slow():
    """Rank 0 came late, and rank 1 waited for it: the time of the one that did not wait is that of both."""
    assert slow([20, 50, 20, 20], units=[0, 0, 2, 2]) == {}
    assert slow([50, 50, 20, 20], units=[0, 0, 2, 2]) == {(0, 1): (50, 20)}
    assert slow([50, 90], units=[0, 0]) == {}


def test_those_with_other_work_are_no_peers():
    assert slow([20, 20, 50, 50], peers=[0, 0, 1, 1]) == {}
    assert slow([20, 20, 50, 70], peers=[0, 0, 1, 1]) == {(3,): (70, 50)}


def test_what_is_said():
    one = Straggler((3,), ("node-b",), "forward", 0.05, 0.02, 3)
    assert str(one) == "rank 3 on node-b takes 50 ms a step for forward, where the median is 20 ms"
    several = Straggler(tuple(range(10)), ("a",) * 5 + ("b",) * 5, "forward", 0.05, 0.02, 3)
    assert str(several).startswith(
        "one of ranks 0, 1, 2, 3, 4, 5, 6, 7, …, which wait for one another in it, on a, b takes 50 ms"
    )
    report = StepReport(50, [0.1, 0.1, 0.1], {"data": [0.001, 0.03, 0.002]})
    assert str(report) == (
        "step 50: least / median / most of 3 processes: whole 100 ms / 100 ms / 100 ms, data 1 ms / 2 ms / 30 ms"
    )
