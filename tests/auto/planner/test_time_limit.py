"""Every phase of a search is under its one limit, by a clock that these tests turn on by hand."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch import auto_accelerate
from atorch.auto import session
from atorch.auto.plain_pass import PlainPass
from atorch.auto.planner import planner
from atorch.auto.planner.clock import Clock
from atorch.auto.planner.guard import quick_collections
from tests.auto.planner.jobs import context, net
from tests.auto.planner.test_search import assert_same, find, snapshot
from tests.auto.test_attempt import found
from tests.pool import Pool
from tests.roads import job
from tests.roads import net as by_road

LIMIT, LEFT = 1000.0, 0.05


class Hand:
    """A clock's hand."""

    def __init__(self) -> None:
        self.time = 0.0
        self.clock = Clock(LIMIT, now=lambda: self.time, began=0.0)

    def leave(self, seconds: float) -> None:
        self.time = self.clock.whole - seconds


class Stuck(nn.Module):
    """Does not come back from a real pass on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.rounds = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        while own == self.rank and not isinstance(x, FakeTensor):
            self.rounds += 1
        return x


@contextmanager
def turned_on(hand: Hand, name: str, *, before: float = LIMIT, after: float = 0.0) -> Iterator[None]:
    """So many seconds are left before, and after, the planner's function of that name."""
    real: Callable[..., Any] = getattr(planner, name)

    def turned(*args: Any, **kwargs: Any) -> Any:
        hand.leave(before)
        made = real(*args, **kwargs)
        hand.leave(after)
        return made

    with mock.patch.object(planner, name, turned):
        yield


def stuck(rank: int, size: int, where: int) -> tuple[str, Any, int, str]:
    """A search in which plain training's first pass does not end on one rank."""
    hand, model = Hand(), nn.Sequential(Stuck(where), net())
    before = snapshot(model)
    with turned_on(hand, "plain_pass", before=LEFT):
        plan = find(context(model), clock=hand.clock)
    assert_same(before, snapshot(model))
    assert vars(model[0])["rounds"] == 0
    assert plan.plain_pass is not None
    return str(plan.strategy), plan.measured, plan.num_dry_runs, str(plan.plain_pass.why_not)


def test_plain_trainings_first_pass_is_given_up() -> None:
    strategy, measured, _, why_not = stuck(0, 1, 0)
    assert strategy == "plain"
    assert measured is None
    assert "the time was over" in why_not


def test_it_is_given_up_on_all_processes(pool: Pool) -> None:
    for strategy, measured, _, why_not in pool.run(stuck, 1):
        assert strategy == "parallel_mode(data 2) + ddp"
        assert measured is None
        assert "the time was over" in why_not


def test_the_ranking_is_given_up() -> None:
    hand = Hand()

    def endless(*_: Any) -> Any:
        while True:
            pass

    with turned_on(hand, "_traced", after=LEFT), mock.patch.object(planner, "best_level", endless):
        plan = find(context(), clock=hand.clock)
    assert str(plan.strategy) == "plain"
    assert plan.estimate is None
    assert "no time for a dry run" in plan.notes[0]
    assert plan.plain_pass is not None
    assert plan.plain_pass.why_not == "there was no time for it", "which is not made up for when it is over"


class Ring:
    """Holds itself."""

    def __init__(self) -> None:
        self.own = self


def test_collections_in_a_search_are_of_what_it_made() -> None:
    gc.unfreeze()  # what the tests' session froze
    with quick_collections():
        before, alive = gc.get_freeze_count(), weakref.ref(Ring())
        gc.collect()
        assert alive() is None
    assert before > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with quick_collections():
        pass
    assert gc.get_freeze_count() > 10_000, "somebody else's stay"


@pytest.mark.matrix
def test_time_is_left_to_apply_what_is_chosen() -> None:
    hand = Hand()
    plan = find(context(), clock=hand.clock, included=["checkpoint"])
    assert plan.measured is not None
    assert hand.clock.left <= hand.clock.whole - 0.3 * plan.measured.startup_s


def test_plain_trainings_first_pass_is_run_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = replace(found(["checkpoint"], 1), plain_pass=PlainPass(why_not="the search said so"))
    with (
        mock.patch.object(session, "_searched", return_value=plan),
        mock.patch.object(session, "plain_pass", side_effect=AssertionError),
        caplog.at_level(logging.WARNING, "atorch"),
    ):
        assert auto_accelerate(by_road("ByLambda"), **job())[0]
    assert "the search said so" in caplog.text


@pytest.mark.parametrize(("limit", "is_told"), [(None, True), (60.0, False)])
def test_the_limit_is_told_where_the_user_gave_none(
    limit: float | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(planner, "_traced", return_value=None), caplog.at_level(logging.INFO, "atorch"):
        planner.search(context(), time_limit=limit, progress=lambda _: None)
    told = "the search takes at most 1 min 54 s, or 60 steps of the baseline where these take longer; give time_limit"
    assert (told in caplog.text) == is_told


def test_a_default_limit_grows_with_the_baseline_s_steps() -> None:
    clock = Clock()
    clock.saw_step(0.5)
    assert clock.whole == pytest.approx(0.95 * 120)
    clock.saw_step(10.0)
    assert clock.whole == pytest.approx(0.95 * 600)
