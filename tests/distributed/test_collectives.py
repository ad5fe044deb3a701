"""What one rank finds out, every rank hears."""

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from atorch.distributed import collectives
from atorch.distributed.barrier_diagnostics import answered
from atorch.distributed.collectives import (
    all_or_none,
    call_on_all_ranks,
    checked_barrier,
    from_rank_zero,
    gather_objects,
    is_distributed,
    require_equal,
    synchronise,
)
from atorch.distributed.fingerprints import facts_of
from atorch.errors import ArgumentError, AtorchError, CapabilityError, StrategyError
from tests.auto.training import run_each
from tests.pool import Pool, on_ranks


def test_one_process_decides_alone() -> None:
    assert not is_distributed()
    assert gather_objects("a") == ["a"]
    assert from_rank_zero("a") == "a"
    assert all_or_none(lambda: 3) == 3
    require_equal(1, "the number", StrategyError)
    with pytest.raises(StrategyError, match="^no$"):
        all_or_none(lambda: fail(StrategyError("no")))


def fail(error: Exception) -> None:
    raise error


class OwnError(CapabilityError):
    """A plug-in's error, which the other ranks cannot make."""

    def __init__(self, package: str, version: int) -> None:
        super().__init__(f"{package} {version} is missing")


ERRORS = {"strategy": StrategyError("bad"), "own": OwnError("te", 2), "foreign": KeyError("x")}


@on_ranks(3)
def test_values_travel(rank: int, size: int) -> None:
    assert is_distributed()
    assert gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert from_rank_zero(f"from {rank}") == "from 0"
    assert all_or_none(lambda: rank * 10) == rank * 10


def fail_on(rank: int, size: int, failing: list[int], name: str) -> tuple[str, str]:
    try:
        all_or_none(lambda: fail(ERRORS[name]) if rank in failing else None)
    except (AtorchError, KeyError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_one_fails_all_fail(pool: Pool) -> None:
    cases = [([1], "strategy"), ([0, 1], "strategy"), ([], "strategy"), ([1], "own"), ([1], "foreign")]
    one, two, none, own, foreign = run_each(pool, fail_on, cases, ranks=3)
    assert one == [("StrategyError", text) for text in ("rank 1 failed: bad", "bad", "rank 1 failed: bad")]
    assert two == [("StrategyError", text) for text in ("bad", "bad", "rank 0 failed: bad")]
    assert none == [("", "")] * 3
    # A class that others cannot make is told as the nearest of atorch's.
    assert own[:2] == [("CapabilityError", "rank 1 failed: te 2 is missing"), ("OwnError", "te 2 is missing")]
    assert foreign[:2] == [("ArgumentError", "rank 1 failed: KeyError: 'x'"), ("KeyError", "'x'")]


def compare(rank: int, size: int, values: list[Any]) -> str:
    try:
        require_equal(values[rank], "the strategy", StrategyError)
    except StrategyError as error:
        return str(error)
    return ""


def test_a_difference_is_an_error_on_every_rank(pool: Pool) -> None:
    whole, item, told = [0, 1, 2, 3, 4], "the strategy", "the strategy differs between processes: "
    cases: list[tuple[list[Any], str]] = [
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2}], ""),
        (["a", "b", "a"], f"{told}the strategy is 'a' on ranks 0, 2 and 'b' on rank 1"),
        ([whole, whole, [0, 1, 2, 9, 4]], f"{told}{item}[3] is '3' on ranks 0, 1 and '9' on rank 2"),
        ([whole, whole[:-1], whole], f"{told}{item}[4] is '4' on ranks 0, 2 and not given on rank 1"),
    ]
    found = run_each(pool, compare, [(values,) for values, _ in cases], ranks=3)
    assert found == [[expected] * 3 for _, expected in cases]


@on_ranks(3)
def test_what_differs_is_named_without_sending_all_to_all(rank: int, size: int) -> None:
    """Of 1,000 values three are rank 1's own, and one is rank 2's."""
    values = list(range(1000))
    for place in {0: (), 1: (5, 500, 700), 2: (600,)}[rank]:
        values[place] = -1
    sent: list[int] = []
    real = dist.all_gather_object

    def measured(values: list[Any], value: Any, **kwargs: Any) -> None:
        sent.append(len(pickle.dumps(value)))
        real(values, value, **kwargs)

    with mock.patch.object(dist, "all_gather_object", measured), pytest.raises(ArgumentError) as caught:
        call_on_all_ranks("call", lambda: {"given": facts_of("given", values)}, lambda: rank)
    told = str(caught.value)
    assert "given[5] is 5 on ranks 0, 2 and -1 on rank 1; given[500] is 500 on ranks 0, 2 and -1 on rank 1" in told
    assert "given[600] is 600 on ranks 0, 1 and -1 on rank 2" in told
    assert max(sent) < 1000


@on_ranks(2)
def test_where_all_is_well_a_few_numbers_are_exchanged(rank: int, size: int) -> None:
    called: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather_object", "broadcast_object_list", "broadcast"):
            stack.enter_context(mock.patch.object(dist, name, noted(name)))
        all_or_none(lambda: rank)
        require_equal(["a"] * 1000, "the strategy", StrategyError)
        call_on_all_ranks("call", lambda: {"given": facts_of("given", list(range(1000)))}, lambda: rank)
        synchronise([torch.ones(3), torch.zeros(2, 2)])
    assert called == ["all_reduce"] * 4


def convolutions(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model.register_buffer("phases", torch.polar(torch.ones(3), torch.randn(3)))
    return model


@on_ranks(2)
def test_every_rank_gets_the_values_of_rank_0_of_models_that_are_alike(rank: int, size: int) -> None:
    expected = convolutions(0).state_dict()
    for seed in (0, rank):
        model = convolutions(seed)
        synchronise([*model.parameters(), *model.buffers(), torch.empty(3, device="meta")])
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert all(parameter.requires_grad for parameter in model.parameters())
    other = torch.nn.Linear(2, 2) if rank else convolutions(0)
    with pytest.raises(ArgumentError, match="^the model differs between processes"):
        synchronise([*other.parameters(), *other.buffers()])


@on_ranks(2)
def test_one_bit_is_seen_wherever_it_lies(rank: int, size: int) -> None:
    """At the start, middle or end of a tensor; and in one whose elements lie apart."""
    for place in (0, 7, 10):
        whole = torch.ones(14, dtype=torch.bfloat16)
        tensors = [whole[3:], torch.ones(2, 3).t(), torch.empty(0), torch.tensor(1.0), torch.tensor([True, False])]
        if rank == 1:
            tensors[0][place] = 1.0078125
        synchronise(tensors)
        assert tensors[0].tolist() == [1.0] * 11
    apart = (torch.arange(8.0) + rank)[::2]
    synchronise([apart])
    assert apart.tolist() == [0.0, 2.0, 4.0, 6.0]


@on_ranks(2)
def test_who_does_not_come_to_a_meeting_is_named(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    checked_barrier("store()", group)
    if rank == 1:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MEETING", timedelta(seconds=0.01))
        patch.setattr(collectives, "TIMEOUT", timedelta(seconds=0.1))
        with pytest.raises(ArgumentError, match=r"store\(\) is called on rank 0 but not on 1"):
            checked_barrier("store()", group)


@pytest.mark.parametrize(
    ("call", "ends"), [("together", False), ("together", True), ("gather_objects", False), ("agreed", False)]
)
@on_ranks(3)
def test_who_does_not_come_to_an_exchange_is_named_when_time_is_up(rank: int, size: int, call: str, ends: bool) -> None:
    """Rank 1, which unless it ends is there while the others wait."""
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if not ends:
            store.wait(["told"])
        return
    calls = {
        "together": lambda: all_or_none(lambda: rank, group),
        "gather_objects": lambda: gather_objects(rank, group),
        "agreed": lambda: call_on_all_ranks("plan", lambda: {}, lambda: rank, group=group),
    }
    with pytest.raises(ArgumentError, match="rank 1 did not come to an exchange in which ranks 0, 2 waited") as caught:
        calls[call]()
    assert str(caught.value).startswith("plan got no answer from the other processes") == (call == "agreed")
    if store.add("caught", 1) == size - 1:
        store.set("told", "")


@on_ranks(2)
def test_where_all_came_it_is_the_connection(rank: int, size: int) -> None:
    told = r"all processes came to an exchange, and lost their connection in it \(Connection reset by peer\)"
    with pytest.raises(ArgumentError, match=told):
        answered(lambda: fail(RuntimeError("Connection reset by peer")), dist.group.WORLD)
