"""Processes that are called differently are told so at once, all of them; what may differ is left alone."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

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

    def __init__(self, order: tuple[str, ...] = ("weight", "bias")) -> None:
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


def given(case: str, rank: int, folder: str) -> dict[str, Any]:
    """The arguments of a rank: those of `job`, and on rank 1 one that differs."""
    ddp = {"load_strategy": ["ddp"]}
    one = rank == 1
    return {
        "load_strategy": {"load_strategy": ["fsdp"] if one else ["ddp"]},
        "knob": {"load_strategy": [("ddp", {"bucket_cap_mb": 5 if one else 6})]},
        "search and load": {"load_strategy": None if one else ["ddp"]},
        "finetune": {**ddp, "finetune_strategy": one},
        "dry run": {**ddp, "ignore_dryrun_on_load_strategy": not one},
        "no dataset": {**ddp, "dataset": None if one else PAIRS},
        "no dataset, search": {"load_strategy": None, "dataset": None if one else PAIRS},
        "dataset length": {**ddp, "dataset": PAIRS[:8] if one else PAIRS},
        "dataset type": {**ddp, "dataset": tuple(PAIRS) if one else PAIRS},
        "batch size": {**ddp, "dataloader_args": {"batch_size": 8 if one else 4}},
        "learning rate": {**ddp, "optim_args": {"lr": 0.2 if one else 0.1}},
        "optimizer": {**ddp, "optim_func": torch.optim.Adam if one else torch.optim.SGD},
        "no optimizer": {**ddp, "optim_func": None if one else torch.optim.SGD},
        "learning rate in a partial": {
            **ddp,
            "optim_args": None,
            "optim_func": functools.partial(torch.optim.SGD, lr=0.2 if one else 0.1),
        },
        "learning rate in a closure": {**ddp, "optim_func": drawn_from_elsewhere(rank)},
        "scheduler": {
            **ddp,
            "lr_scheduler_cls": torch.optim.lr_scheduler.StepLR,
            "lr_scheduler_args": {"step_size": 2 if one else 3},
        },
        "loss": {**ddp, "loss_func": other_loss if one else loss_func},
        "lambda": {**ddp, "prepare_input": (lambda data, to: data) if one else (lambda data, to: (*data,))},
        "input format": {**ddp, "model_input_format": None if one else "unpack_sequence"},
        "excluded": {"load_strategy": None, "excluded": ["fsdp"] if one else None},
        "seed": {**ddp, "sampler_seed": 1 if one else 2},
        "time limit": {"load_strategy": None, "time_limit": 3 if one else 4},
        "option": {**ddp, "find_unused_parameters": one},
        "unknown keyword": {**ddp, **({"verbos": True} if one else {})},
        "keyword of one": {**ddp, **({"time_limit": 3} if one else {})},
        "saved": {**ddp, "save_strategy_to_file": f"{folder}/strategy.json" if one else None},
        "saved by rank 0": {**ddp, "save_strategy_to_file": None if one else f"{folder}/strategy.json"},
        "file of one": {"load_strategy": f"{folder}/none.json" if one else f"{folder}/ddp.json"},
        "model": {**ddp, "model": Wide() if one else Net()},
        "no model": {**ddp, "model": None if one else Net()},
        "order": {**ddp, "model": Turned(("bias", "weight")) if one else Turned()},
        "frozen": {**ddp, "model": frozen() if one else Net()},
        "eval": {**ddp, "model": Net().eval() if one else Net()},
    }[case]


DIFFERENCES = {
    "load_strategy": "load_strategy is .*ddp.* on rank 0 and .*fsdp.* on rank 1",
    "knob": "load_strategy is .*6.* on rank 0 and .*5.* on rank 1",
    "search and load": "load_strategy is .*ddp.* on rank 0 and None on rank 1",
    "finetune": "finetune_strategy is False on rank 0 and True on rank 1",
    "dry run": "ignore_dryrun_on_load_strategy is True on rank 0 and False on rank 1",
    "no dataset": "dataset is a list of 16 samples on rank 0 and None on rank 1",
    "no dataset, search": "so they need dataset.* Processes differ: dataset is a list of 16 samples on rank 0 and None",
    "dataset length": "dataset is a list of 16 samples on rank 0 and a list of 8 samples on rank 1",
    "dataset type": "dataset is a list of 16 samples on rank 0 and a tuple of 16 samples on rank 1",
    "batch size": r"dataloader_args\['batch_size'\] is 4 on rank 0 and 8 on rank 1",
    "learning rate": r"optim_args\['lr'\] is 0.1 on rank 0 and 0.2 on rank 1",
    "optimizer": "optim_func is .*SGD on rank 0 and .*Adam on rank 1",
    "no optimizer": "optim_func is .*SGD on rank 0 and None on rank 1",
    "learning rate in a partial": "optim_func's argument 'lr' is 0.1 on rank 0 and 0.2 on rank 1",
    "learning rate in a closure": r"the optimizer's group 0\['lr'\] is 0.1 on rank 0 and 0.2 on rank 1",
    "scheduler": r"lr_scheduler_args\['step_size'\] is 3 on rank 0 and 2 on rank 1",
    "loss": "loss_func is .*loss_func.* on rank 0 and .*other_loss.* on rank 1",
    "lambda": "prepare_input is .*lambda.*code.* on rank 0 and .*lambda.*code.* on rank 1",
    "input format": "model_input_format is 'unpack_sequence' on rank 0 and None on rank 1",
    "excluded": r"excluded\[0\] is not given on rank 0 and 'fsdp' on rank 1",
    "seed": "sampler_seed is 2 on rank 0 and 1 on rank 1",
    "time limit": "time_limit is 4 on rank 0 and 3 on rank 1",
    "option": "find_unused_parameters is False on rank 0 and True on rank 1",
    "unknown keyword": "rank 1 failed: .* no argument 'verbos'; did you mean 'verbose'",
    "keyword of one": "time_limit is None on rank 0 and 3 on rank 1",
    "saved": "save_strategy_to_file is not given on rank 0 and given on rank 1",
    "saved by rank 0": "save_strategy_to_file is given on rank 0 and not given on rank 1",
    "file of one": "rank 1 failed: .*none.json",
    "model": r"parameter 0 of the model is 'linear.weight' \(1, 4\) .* on rank 0 and .* \(1, 8\) .* on rank 1",
    "no model": "rank 1 failed: model is NoneType",
    "order": "parameter 0 of the model is 'weight' .* on rank 0 and 'bias' .* on rank 1",
    "frozen": r"parameter 1 of the model is 'linear.bias' .*, trains on rank 0 and .* is frozen .* on rank 1",
    "eval": "the model is a .*Net in training mode on rank 0 and .* in eval mode on rank 1",
}


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
        first, second = soon(by_rank)
        assert re.search(message, first)
        assert re.search(message.removeprefix("rank 1 failed: "), second)


def accelerate_as_given(rank: int, size: int, case: str, folder: str) -> Told:
    arguments = {"model": Net(), **job(**given(case, rank, folder))}
    return told_by(lambda: auto_accelerate(arguments.pop("model"), **arguments))


def test_a_difference_is_told_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "ddp.json").write_text('["ddp"]')
    told = run_each(pool, accelerate_as_given, [(case, str(tmp_path)) for case in DIFFERENCES])
    check_told(told, DIFFERENCES.values())


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


def plan_differently(rank: int, size: int, case: str) -> Told:
    more: dict[str, Any] = {
        "keyword": {"time_limitt": 3} if rank else {},
        "value": {"optim_args": {"lr": 0.1 * (1 + rank)}},
        "dataset": {},
    }[case]
    dataset = PAIRS[:8] if rank and case == "dataset" else PAIRS
    return told_by(lambda: atorch.plan(Net(), torch.optim.SGD, dataset, loss_func, **more))  # type: ignore[call-overload]


PLANS = {
    "keyword": "did you mean 'time_limit'",
    "value": "is 0.1 on rank 0 and 0.2 on",
    "dataset": "8 samples on rank 1",
}


def test_plans_are_told_too(pool: Pool) -> None:
    check_told(run_each(pool, plan_differently, [(case,) for case in PLANS]), PLANS.values())


def start_engines(rank: int, size: int, case: str) -> Told:
    config: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 0.01 + rank * (case == "learning rate")}}}
    own = {**config, **({"optimiser": 3} if rank else {})}
    return told_by(
        {
            "learning rate": lambda: initialize_engine(Net, rank, config),
            "key": lambda: initialize_engine(Net, rank, own),
            "model": lambda: initialize_engine(Wide if rank else Net, rank, config),
            "by hand": lambda: PatrickStarEngine(Wide() if rank else Net(), PatrickStarClient(rank), config),
            "another door": lambda: (
                initialize_engine(Net, rank, config) if rank else auto_accelerate(Net(), **job(load_strategy=["ddp"]))
            ),
        }[case]
    )


ENGINES = {
    "learning rate": r"lr'\] is 0.01 on rank 0 and 1.01 on rank 1",
    "key": "'optimiser'",
    "model": "model_func is tests.auto.test_accelerate.Net on rank 0 and tests.auto.test_arguments.Wide on rank 1",
    "by hand": r"parameter 0 of the model is 'linear.weight' \(1, 4\)",
    "another door": "the call is auto_accelerate on rank 0 and initialize_engine on rank 1",
}


def test_engines_are_told_too(pool: Pool) -> None:
    check_told(run_each(pool, start_engines, [(case,) for case in ENGINES]), ENGINES.values())


def apply_differently(rank: int, size: int, case: str) -> Told:
    given = {name: value for name, value in job().items() if name != "load_strategy"}
    model = Wide() if rank and case == "model" else Net()
    ctx = make_context(model, **given, world=worlds.init("cpu"), cluster=cluster(size))
    strategy = Strategy.of(["zero1"] if rank and case == "strategy" else ["ddp"])
    return told_by(lambda: complete(strategy, size).apply(ctx))


BY_HAND = {
    "strategy": "the strategy is .*ddp.* on rank 0 and .*zero1.* on rank 1",
    "model": "parameter 0 of the model",
}


def test_strategies_by_hand_are_told_too(pool: Pool) -> None:
    check_told(run_each(pool, apply_differently, [(case,) for case in BY_HAND]), BY_HAND.values())


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


def test_a_process_that_does_not_come_is_named_soon_and_told_when_the_time_is_up(pool: Pool) -> None:
    assert timedelta(seconds=5) > collectives.MEETING
    (told, warned), _ = pool.run(call_alone, timeout=30)
    said = "auto_accelerate is called on rank 0 but not on 1; call it on all together"
    assert warned == [f"{said} (this process waits for them)"]
    assert "auto_accelerate got no answer from the other processes, which all have to call it" in told


def count_collectives(rank: int, size: int, case: str) -> list[str]:
    """What a door sends first, whichever branch it would take."""
    calls: list[str] = []
    real = dist.all_gather_object

    def counted(values: list[Any], value: Any, group: Any = None) -> None:
        calls.append(value[0] if isinstance(value, tuple) else "?")
        real(values, value, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", counted)
        accelerate_as_given(rank, size, case, "")
    return calls[:1]


def test_the_first_collective_is_the_agreement(pool: Pool) -> None:
    cases = [(case,) for case in ("search and load", "no dataset", "unknown keyword", "no model", "eval")]
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


def test_a_timeout_reaches_the_groups_that_are_made(pool: Pool) -> None:
    assert pool.run(timeouts_of_a_start) == [{77.0}] * 2
