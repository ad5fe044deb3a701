"""Every phase of a search is under its one limit, by a clock that these tests turn on by hand."""

import gc
import logging
import weakref
from dataclasses import replace
from unittest import mock

import pytest

from atorch import auto_accelerate
from atorch.auto import session
from atorch.auto.planner import planner
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, quick_collections
from atorch.auto.planner.dry_runs.time_budget import TimeBudget
from atorch.auto.planner.dry_runs.trial import BatchCache, Trial
from atorch.auto.reference_step import ReferenceStep
from atorch.auto.strategy import Strategy
from tests.auto.planner.jobs import context
from tests.auto.planner.test_search import find
from tests.auto.test_rollback import found
from tests.pool import Pool
from tests.roads import job
from tests.roads import net as by_road

LIMIT = 1000.0


class Hand:
    """A clock's hand."""

    def __init__(self) -> None:
        self.time = 0.0
        self.clock = TimeBudget(LIMIT, now=lambda: self.time, began=0.0)

    def leave(self, seconds: float) -> None:
        self.time = self.clock.whole - seconds


def slow(rank: int, size: int) -> tuple[str, int, float]:
    """A search whose time is over before anything ran."""
    hand = Hand()
    hand.leave(-1.0)
    plan = find(context(), clock=hand.clock)
    assert plan.measured is None
    assert plan.baseline is not None
    assert plan.plain_pass is not None
    assert plan.plain_pass.why_not is None, "what never ran is held to it when it is applied"
    assert "the choice is unmeasured" in plan.notes[0]
    return str(plan.strategy), plan.num_dry_runs, plan.baseline.expected_s


def test_without_time_what_the_estimate_puts_first_is_chosen_and_nothing_runs(pool: Pool) -> None:
    assert slow(0, 1)[1] == 0

    one, two = pool.run(slow)
    assert one == two


def test_a_start_is_given_up_between_its_phases_where_time_is_over() -> None:
    ctx = context()
    trial = Trial(ctx, Strategy(), Coordinator(ctx.world), BatchCache(ctx), 30.0, limit_s=0.0)
    assert not trial.start()
    assert trial.is_overdue
    assert "its time was over" in str(trial.failure)
    trial.close()


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


def test_plain_trainings_first_pass_is_run_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = replace(found(["checkpoint"], 1), plain_pass=ReferenceStep(why_not="the search said so"))
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
    stopped = mock.patch.object(planner, "starting_point", side_effect=KeyboardInterrupt)
    with stopped, caplog.at_level(logging.INFO, "atorch"), pytest.raises(KeyboardInterrupt):
        planner.search(context(), time_limit=limit, progress=lambda _: None)
    told = "the search takes at most 1 min 26 s, or 30 steps of what it chooses where these take longer; give"
    assert (told in caplog.text) == is_told
