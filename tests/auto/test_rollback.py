"""What a search chose and the model itself then refuses: the baseline takes its place, on all processes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from atorch.auto import session
from atorch.auto.planner.dry_runs.fault_barrier import attempt
from atorch.auto.planner.plan import Baseline, Measurement, Plan, Rejected
from atorch.auto.strategy import METHODS, Method, Phase, Strategy, method
from atorch.errors import StrategyError
from atorch.model.copy import lazy_clone
from tests.auto.planner.jobs import context
from tests.auto.training import messages, run_each
from tests.pool import Pool
from tests.roads import job, net, trained_plainly

RAN = Measurement(step_s=0.1, num_steps=5, startup_s=0.1, peak_bytes=1.0, memory_kind="none")


@contextmanager
def failing(how: str, where: int) -> Iterator[None]:
    """A method that damages the model, and then fails on one rank while others wait for it, or computes nonsense."""

    @method("failing", phase=Phase.STEP)
    class Failing(Method):
        def apply(self, ctx: Any) -> Any:
            if how == "wrong":
                return replace(ctx, loss_func=lambda batch, output: ctx.loss_func(batch, output) * 2)
            torch.rand(3)
            for part in ctx.parts:
                part.eval()
            if ctx.world.rank == where:
                raise MemoryError("out of memory")
            if ctx.world.size > 1:
                torch.distributed.barrier(ctx.need_mesh().group("data", "zero"))
            return ctx

    try:
        yield
    finally:
        METHODS.remove("failing")


def found(strategy: list[Any], size: int) -> Plan:
    """A search's outcome: `strategy`, and beside it the baseline, which is next best."""
    first = Strategy.of([] if size == 1 else [("parallel_mode", [("data", size)]), "ddp"])

    def instead(reason: str) -> Plan:
        failed = Rejected(strategy=plan.strategy, why="failed", reason=reason, measured=RAN)
        told = f"{plan.strategy} was chosen, and failed when it was applied: {reason}"
        return replace(plan, strategy=first, rejected=(failed,), notes=(told,))

    plan = Plan(
        strategy=Strategy.of([*([] if size == 1 else [("parallel_mode", [("data", size)])]), *strategy]),
        estimate=None, measured=RAN, num_compositions=2, num_dry_runs=2, seconds=1.0, memory_bytes=1e9,
        rejected=(Rejected(strategy=first, why="slower", reason="10% slower", measured=RAN),),
        baseline=Baseline(strategy=first, measured=RAN, expected_s=0.1, gain=0.1), instead=instead,
    )  # fmt: skip
    return plan


def fallen_back(rank: int, size: int, how: str, where: int, others: list[Any]) -> tuple[str, Any, str, bool]:
    """The strategy, its report and what was said; whether it then trains as torch does."""
    model, torch_state = net("ByLambda"), torch.get_rng_state()
    expected, before = trained_plainly(net("ByLambda")), copy.deepcopy(model.state_dict())
    names = {name: id(each) for name, each in model.named_parameters()}
    torch.set_rng_state(torch_state)
    looked: list[bool] = []
    apply = session.accelerate

    def look(ctx: Any, strategy: Any, verify: bool) -> Any:
        if "failing" not in strategy:
            state = ctx.root.state_dict()
            looked.append(
                all(torch.equal(value, before[name]) for name, value in state.items())
                and all(type(module).__module__ != "atorch.runtime" for module in ctx.root.modules())
                and {name: id(each) for name, each in ctx.root.named_parameters()} == names
                and all(each.grad is None and each.requires_grad for each in ctx.root.parameters())
                and all(module.training for module in ctx.root.modules())
                and torch.equal(torch.get_rng_state(), torch_state)
            )
        return apply(ctx, strategy, verify)

    with messages() as said, failing(how, where), mock.patch.object(session, "accelerate", look):
        plan = found([*others, "failing"], size)
        with mock.patch.object(session, "_searched", return_value=plan):
            torch.set_rng_state(torch_state)
            _, result, strategy = auto_accelerate(model, **job())
    for batch in result.dataloader:
        result.step(batch)
    for name, value in result.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    return str(strategy), strategy.report, "\n".join(said), looked == [True]


HALF: list[Any] = ["half"]


@pytest.mark.parametrize(
    ("how", "others", "reason"),
    [
        ("memory", [], "MemoryError: out of memory"),
        ("memory", HALF, "MemoryError: out of memory"),
        ("memory", ["chunk"], "MemoryError: out of memory"),
        ("wrong", ["checkpoint", "module_replace"], "does not compute what plain training does"),
    ],
)
def test_what_is_next_best_takes_the_place_of_a_choice_that_fails(how: str, others: list[Any], reason: str) -> None:
    strategy, report, said, is_as_before = fallen_back(0, 1, how, 0, others)
    assert strategy == "plain"
    assert is_as_before
    assert reason in report["rejected"][0]["reason"]
    assert "failing" in str(report["rejected"][0]["strategy"])
    assert reason in report["notes"][-1]
    assert "failing was chosen, and failed when it was applied" in said


def test_all_processes_fall_back_together_and_a_loaded_strategy_raises(pool: Pool) -> None:
    cases: list[Any] = [
        ("memory", 1, ["fsdp"]),
        ("memory", 1, ["zero1"]),
        ("memory", 1, ["ddp"]),
        ("wrong", 1, ["zero2"]),
    ]
    for strategy, report, _, is_as_before in chain(*run_each(pool, fallen_back, cases)):
        assert strategy == "parallel_mode(data 2) + ddp"
        assert is_as_before
        assert "on rank" in report["notes"][-1]

    with failing("wrong", 0), pytest.raises(StrategyError, match="does not compute"):
        auto_accelerate(net("ByLambda"), load_strategy=["failing"], **job())


def test_a_model_is_put_back_whatever_was_done_to_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.config = type("Config", (), {})()  # type: ignore[assignment]
    model.config.use_cache, first, weight = True, model[0], model[2].weight
    model[2].weight.grad = torch.ones(4, 4)
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def damage(ctx: Any) -> None:
        root = ctx.root
        root.config.use_cache = False
        root[0].register_forward_hook(lambda *_: None)
        root[0].weight.register_hook(lambda grad: grad * 0)
        root[0] = nn.Identity()
        root[1].running_mean += 1
        weight.grad = None
        weight.data.zero_()
        weight.data = torch.empty(0)
        first.weight.requires_grad_(False)
        first.bias.data = first.bias.data.half()
        raise MemoryError("short")

    made, why = attempt(context(model), damage)
    assert made is None
    assert why == "MemoryError: short"
    assert model[0] is first
    assert model[2].weight is weight
    assert not first._forward_hooks
    assert not first.weight._backward_hooks
    assert first.weight.requires_grad
    assert model.config.use_cache
    assert torch.equal(weight.grad, torch.ones(4, 4))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    model(torch.randn(3, 4)).sum().backward()

    tensor = torch.ones(4).share_memory_()
    lazy_clone(tensor).zero_()
    assert torch.equal(tensor, torch.ones(4))
