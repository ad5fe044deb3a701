"""Processes that are called differently are told so at once, all of them; what may differ is left alone."""

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

import atorch
from atorch import auto_accelerate
from atorch.auto.arguments import CallOptions
from atorch.auto.job import make_context
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.strategy import Strategy
from atorch.distributed import collectives
from atorch.distributed import world as worlds
from atorch.distributed.collectives import call_on_all_ranks, use_world_group
from atorch.errors import ArgumentError, AtorchError
from atorch.patrickstar.core import PatrickStarClient
from atorch.patrickstar.runtime import PatrickStarEngine, initialize_engine
from tests.auto.planner.jobs import cluster
from tests.auto.test_accelerate import PAIRS, Net, job, loss_func
from tests.auto.training import run_each
from tests.pool import Pool


def other_loss(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return loss_func(batch, output) * 2


def drawn_from_elsewhere(rank: int) -> Any:
    """An optimizer whose learning rate is nowhere in the arguments."""
    rate = 0.1 * (1 + rank)
    return lambda parameters, lr: torch.optim.SGD(parameters, lr=rate)


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)


class Turned(nn.Module):
    """The parameters of `Net`, in another order."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        values = {"weight": torch.zeros(1, 4), "bias": torch.zeros(1, 4)}
        for name in order:
            self.register_parameter(name, nn.Parameter(values[name]))

    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        return (x * self.weight + self.bias).sum(1, keepdim=True)


def frozen() -> nn.Module:
    model = Net()
    model.linear.bias.requires_grad_(False)
    return model


def scheduler(step_size: int) -> dict[str, Any]:
    return {"lr_scheduler_cls": StepLR, "lr_scheduler_args": {"step_size": step_size}}


def partial(rate: float) -> dict[str, Any]:
    return {"optim_args": None, "optim_func": functools.partial(torch.optim.SGD, lr=rate)}


MOVING = [lambda data, to: (*data,), lambda data, to: data]
SAVED = "save_strategy_to_file is"
DIFFERENCES: Mapping[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "load_strategy": ("load_strategy is .*ddp.* | .*fsdp.*", lambda rank: {"load_strategy": [("ddp", "fsdp")[rank]]}),
    "search and load": ("is .*ddp.* | None", lambda rank: {"load_strategy": (["ddp"], None)[rank]}),
    "finetune": ("finetune_strategy is False | True", lambda rank: {"finetune_strategy": rank == 1}),
    "no dataset": ("dataset is a list of 16 samples | None", lambda rank: {"dataset": (PAIRS, None)[rank]}),
    "no dataset, search": (
        "so they need dataset.* Processes differ: dataset is a list of 16 samples | None",
        lambda rank: {"load_strategy": None, "dataset": (PAIRS, None)[rank]},
    ),
    "length": ("a list of 16 samples | a list of 8 samples", lambda rank: {"dataset": PAIRS[: (16, 8)[rank]]}),
    "batch size": (r"\['batch_size'\] is 4 | 8", lambda rank: {"dataloader_args": {"batch_size": (4, 8)[rank]}}),
    "optimizer": ("is .*SGD | .*Adam", lambda rank: {"optim_func": (torch.optim.SGD, torch.optim.Adam)[rank]}),
    "partial": ("optim_func's argument 'lr' is 0.1 | 0.2", lambda rank: partial((0.1, 0.2)[rank])),
    "closure": (r"group 0\['lr'\] is 0.1 | 0.2", lambda rank: {"optim_func": drawn_from_elsewhere(rank)}),
    "scheduler": (r"lr_scheduler_args\['step_size'\] is 3 | 2", lambda rank: scheduler((3, 2)[rank])),
    "loss": ("is .*loss_func.* | .*other_loss.*", lambda rank: {"loss_func": (loss_func, other_loss)[rank]}),
    "lambda": ("is .*lambda.*code.* | .*lambda.*code.*", lambda rank: {"prepare_input": MOVING[rank]}),
    "time limit": ("time_limit is 4 | 3", lambda rank: {"load_strategy": None, "time_limit": 4 - rank}),
    "option": ("unused_parameters is False | True", lambda rank: {"find_unused_parameters": rank == 1}),
    "keyword": ("rank 1 failed: .* no argument 'verbos'", lambda rank: {"verbos": True} if rank else {}),
    "keyword of one": ("time_limit is None | 3", lambda rank: {"time_limit": 3} if rank else {}),
    "saved": (f"{SAVED} not given | given", lambda rank: {"save_strategy_to_file": (None, "s.json")[rank]}),
    "saved by 0": (f"{SAVED} given | not given", lambda rank: {"save_strategy_to_file": ("s.json", None)[rank]}),
    "file": ("rank 1 failed: .*none.json", lambda rank: {"load_strategy": (["ddp"], "/none.json")[rank]}),
    "model": (
        r"parameter 0 .*'linear.weight' \(1, 4\) .* | .* \(1, 8\) .*",
        lambda rank: {"model": (Net, Wide)[rank]()},
    ),
    "no model": ("rank 1 failed: model is NoneType", lambda rank: {"model": (Net(), None)[rank]}),
    "order": (
        "'weight' .* | 'bias' .*",
        lambda rank: {"model": Turned(("weight", "bias") if rank == 0 else ("bias", "weight"))},
    ),
    "frozen": ("'linear.bias' .*, trains | .* is frozen .*", lambda rank: {"model": (Net, frozen)[rank]()}),
    "eval": ("Net in training mode | .* in eval mode", lambda rank: {"model": Net().train(rank == 0)}),
}
"""Per case what is told, and the arguments of a rank beside those of `job`; `A | B` is A on rank 0 and B on rank 1."""


Told = tuple[str, float, float]  # an error's text, when this rank came to the others, and when it raised


def told_by(call: Callable[[], Any]) -> Told:
    """How a call is refused."""
    came: list[float] = []
    real = collectives._answers

    def answers(*args: Any) -> Any:
        came.append(time.time())
        return real(*args)

    with mock.patch.object(collectives, "_answers", answers):
        try:
            call()
        except AtorchError as error:
            return str(error), came[-1] if came else time.time(), time.time()
    return "accepted", 0.0, 0.0


def soon(told: Sequence[Told]) -> list[str]:
    """What the ranks say, each within 5 seconds of when the last of them came."""
    assert max(raised for _, _, raised in told) - max(came for _, came, _ in told) <= 5.0
    return [text for text, _, _ in told]


def check_told(by_case: Sequence[list[Told]], messages: Iterable[str]) -> None:
    """Both ranks say the message of each case, within 5 seconds of when the last of them came."""
    for by_rank, message in zip(by_case, messages, strict=True):
        if " | " in message:
            message = f"{message.replace(' | ', ' on rank 0 and ')} on rank 1"
        first, second = soon(by_rank)
        assert re.search(message, first)
        assert re.search(message.removeprefix("rank 1 failed: "), second)


def accelerate_as_given(rank: int, size: int, case: str) -> Told:
    arguments = {"model": Net(), **job(load_strategy=["ddp"]), **DIFFERENCES[case][1](rank)}
    return told_by(lambda: auto_accelerate(arguments.pop("model"), **arguments))


def test_a_difference_is_told_on_all_ranks(pool: Pool) -> None:
    told = run_each(pool, accelerate_as_given, [(case,) for case in DIFFERENCES])
    check_told(told, (message for message, _ in DIFFERENCES.values()))


def of_its_own(rank: int, size: int, case: str, folder: str) -> bool:
    """What may differ between processes."""
    model = Net()
    if case == "weights":
        torch.manual_seed(rank)
        model = Net()
    more = own_arguments(rank, folder)[case]
    return bool(auto_accelerate(model, **job(**{"load_strategy": ["ddp"], **more}))[0])


def own_arguments(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    return {
        "weights": {},
        "verbose": {"verbose": rank == 0},
        "where it is saved": {"save_strategy_to_file": f"{folder}/{rank}.json"},
        "where it is read": {"load_strategy": f"{folder}/read{rank}.json"},
        "forms of a strategy": {"load_strategy": '["ddp"]' if rank else ["ddp"]},
        "device of the inputs": {"prepare_input": functools.partial(moved, rank=rank)},
        "worker": {"dataloader_args": {"batch_size": 4, "worker_init_fn": functools.partial(start_worker, rank=rank)}},
        "forms of nothing": {
            "optim_args": {"lr": 0.1},
            "excluded": None if rank else [],
            "dataloader_args": {"batch_size": 4},
        },
        "forms of a number": {"optim_args": {"lr": 1 if rank else 1.0}},
        "sizes of a sample": {"sample_batch": (torch.zeros(2, 4 + rank), torch.zeros(2))},
        "callable instances": {"loss_func": Loss(rank)},
    }


def moved(data: Any, device: Any, rank: int) -> Any:
    return data


def start_worker(worker: int, rank: int) -> None: ...


class Loss:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, batch: Any, output: torch.Tensor) -> torch.Tensor:
        return loss_func(batch, output)


def test_what_is_a_processs_own_may_differ(pool: Pool, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"read{rank}.json").write_text('["ddp"]')
    cases = [(case, str(tmp_path)) for case in own_arguments(0, "")]
    assert run_each(pool, of_its_own, cases) == [[True, True]] * len(cases)


def doors(rank: int, size: int) -> dict[str, tuple[str, Callable[[], Any]]]:
    """The errors where other functions are called differently, and the call of a rank."""

    def plan(dataset: Any = PAIRS, **more: Any) -> None:
        atorch.plan(Net(), torch.optim.SGD, dataset, loss_func, **more)

    def engine(model: Any = Net, rate: float = 0.01, **more: Any) -> None:
        initialize_engine(model, rank, {"optimizer": {"type": "Adam", "params": {"lr": rate}}, **more})

    def by_hand(model: nn.Module, strategy: str) -> None:
        given = {name: value for name, value in job().items() if name != "load_strategy"}
        ctx = make_context(model, **given, world=worlds.init("cpu"), cluster=cluster(size))
        complete(Strategy.of([strategy]), size).apply(ctx)

    kind = Wide if rank else Net
    started = f"model_func is {Net.__module__}.Net | {__name__}.Wide"
    adam: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    return {
        "a plan's keyword": ("did you mean 'time_limit'", lambda: plan(**({"time_limitt": 3} if rank else {}))),
        "a plan's value": ("is 0.1 | 0.2", lambda: plan(optim_args={"lr": 0.1 * (1 + rank)})),
        "a plan's dataset": ("16 samples | a list of 8 samples", lambda: plan(PAIRS[:8] if rank else PAIRS)),
        "an engine's rate": (r"lr'\] is 0.01 | 1.01", lambda: engine(rate=0.01 + rank)),
        "an engine's key": ("'optimiser'", lambda: engine(**({"optimiser": 3} if rank else {}))),
        "an engine's model": (started, lambda: engine(kind)),
        "an engine by hand": (
            r"parameter 0 of the model is 'linear.weight' \(1, 4\)",
            lambda: PatrickStarEngine(kind(), PatrickStarClient(rank), adam),
        ),
        "another door": (
            "the call is auto_accelerate | initialize_engine",
            lambda: engine() if rank else auto_accelerate(Net(), **job(load_strategy=["ddp"])),
        ),
        "a strategy by hand": (
            "the strategy is .*ddp.* | .*zero1.*",
            lambda: by_hand(Net(), "zero1" if rank else "ddp"),
        ),
        "its model": ("parameter 0 of the model", lambda: by_hand(kind(), "ddp")),
    }


def through_door(rank: int, size: int, case: str) -> Told:
    return told_by(doors(rank, size)[case][1])


def test_other_functions_tell_too(pool: Pool) -> None:
    cases = doors(0, 2)
    check_told(run_each(pool, through_door, [(case,) for case in cases]), (message for message, _ in cases.values()))


def call_alone(rank: int, size: int) -> tuple[str, list[str]]:
    group, told, warned = dist.new_group(timeout=timedelta(seconds=1)), "", list[str]()
    if rank == 0:
        soon = mock.patch.object(collectives, "MEETING", timedelta(seconds=0.01))
        with (
            use_world_group(group),
            soon,
            mock.patch.object(collectives.logger, "warning", lambda *all, **_: warned.append(all[1])),
        ):
            try:
                call_on_all_ranks("auto_accelerate", dict, lambda: None)
            except ArgumentError as error:
                told = str(error)
    dist.barrier()
    return told, warned


def test_a_process_that_does_not_come_is_told_and_a_timeout_reaches_groups(pool: Pool) -> None:
    assert timedelta(seconds=5) > collectives.MEETING
    (told, warned), _ = pool.run(call_alone, timeout=30)
    said = "auto_accelerate is called on rank 0 but not on 1; call it on all together"
    assert warned == [f"{said} (this process waits for them)"]
    assert "auto_accelerate got no answer from the other processes, which all have to call it" in told

    assert pool.run(timeouts_of_a_start) == [{77.0}] * 2


def count_collectives(rank: int, size: int, case: str) -> list[str]:
    """What a door sends first, whichever branch it would take."""
    calls: list[str] = []
    real = dist.all_gather_object

    def counted(values: list[Any], value: Any, group: Any = None) -> None:
        calls.append(value[0] if isinstance(value, tuple) else "?")
        real(values, value, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", counted)
        accelerate_as_given(rank, size, case)
    return calls[:1]


def test_the_first_collective_is_the_agreement(pool: Pool) -> None:
    cases = [(case,) for case in ("search and load", "no dataset", "keyword", "no model", "eval")]
    assert run_each(pool, count_collectives, cases) == [[["auto_accelerate"]] * 2] * len(cases)


@pytest.mark.parametrize("timeout", [0, -1.0, "60", True, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ArgumentError, match="timeout is .*; it is a finite number of seconds above 0"):
        CallOptions.of({"timeout": timeout})


def timeouts_of_a_start(rank: int, size: int) -> set[float]:
    """The time-outs of the groups that a start makes."""
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as made:
        auto_accelerate(Net(), **job(load_strategy=[("parallel_mode", ([("zero", 2)], None)), "fsdp"]), timeout=77.0)
    return {call.kwargs["timeout"].total_seconds() for call in made.call_args_list}
