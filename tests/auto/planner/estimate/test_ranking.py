"""What a search keeps does not grow with the cluster; rank 0 works it out and the others are told."""

import math
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.planner import ranking as rankings
from atorch.auto.planner.bounds import Bounds
from atorch.auto.planner.candidate_table import CATEGORIES, CandidateTable, preferred
from atorch.auto.planner.dry_runs import dry_run_loop
from atorch.auto.planner.dry_runs.dry_run_loop import MAX_CONTENDERS, MAX_RUNS, DryRunLoop, SearchJob
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator
from atorch.auto.planner.dry_runs.surrogate_model import Surrogate
from atorch.auto.planner.dry_runs.time_budget import Starts, TimeBudget
from atorch.auto.planner.dry_runs.trial import BatchCache
from atorch.auto.planner.estimate import CLEAR, EstimateUncertainty, _saved, _saved_by_kind
from atorch.auto.planner.plan import Measurement
from atorch.auto.planner.planner import starting_point
from atorch.auto.planner.ranking import (
    RUNNABLE,
    RankingSummary,
    SearchLimits,
    best_level,
    gain_of_half,
    methods_of,
    ranked,
)
from atorch.auto.strategy import METHODS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Memory, ModelProfile, plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.cost.uncertainty import KINDS, OWN
from atorch.errors import StrategyError
from tests.auto.planner.dry_runs.test_surrogate_model import scored
from tests.auto.planner.jobs import cluster, context, sabotage
from tests.auto.planner.test_search import find
from tests.pool import Pool

SAME = dict.fromkeys(KINDS, 0.0) | {"products": 1.0, "common": 1.0}
ON_HOST = SAME | {"products": 0.5, "host": 0.5}
_normal = NormalDist()
PLANS = [(METHODS["checkpoint"](),), (METHODS["compile"](),), (METHODS["checkpoint"](), METHODS["compile"]())]


def judged(*plans):
    """(seconds, shares) of plans, the first two equally simple."""
    columns = CandidateTable(1.0, math.inf)
    profile = ModelProfile(segments=(), num_params=1, num_trainable=1, param_bytes=4, trainable_bytes=4, batch_size=1)
    doubt = EstimateUncertainty(plain_cost(profile), ClusterSpec.load("8xH100-80GB"))
    for methods, (seconds, shares) in zip(PLANS, plans, strict=False):
        columns.add(methods, seconds, Memory(**dict.fromkeys(CATEGORIES, 0.0)))
        doubt._shares[methods] = tuple(shares.values())
    return doubt, columns


def test_what_the_estimate_tells_apart_is_chosen_by_it():
    doubt, columns = judged((10.0, SAME), (10.1, SAME))
    assert doubt.chosen(columns) == preferred(columns) == 0
    assert doubt.note(columns, 0) is None
    assert doubt.chance(columns, 1, 0) == pytest.approx(0.5 - 0.04, abs=0.01)  # 1 % of sqrt(2) · OWN
    assert doubt.ties(columns, 0) == [1]

    doubt, columns = judged((10.0, ON_HOST), (10.9, SAME))
    assert doubt.chosen(columns) == 0

    doubt, columns = judged((10.0, SAME), (10.0 * math.exp(3 * OWN), SAME))
    assert doubt.chance(columns, 1, 0) < CLEAR
    assert doubt.ties(columns, 0) == []


def test_what_is_better_known_or_would_decide_is_named():
    doubt, columns = judged((10.0, ON_HOST), (10.05, SAME))
    assert preferred(columns) == 0
    assert doubt.chosen(columns) == 1
    note = doubt.note(columns, 1)
    assert note.startswith("checkpoint is estimated 0.5% faster")
    assert "less certain (host memory, 50 % and 0 % of a step)" in note

    doubt, columns = judged((10.0, SAME), (10.2, ON_HOST))
    run, kind = doubt.decisive(columns, 0)
    assert run.strategy.methods == PLANS[1]
    assert kind.kind == "host"
    assert run.saves > kind.saves > 0
    doubt, columns = judged((10.0, SAME), (11.5, SAME))
    assert doubt.decisive(columns, 0) == ()


@pytest.mark.parametrize(("slower", "spread"), [(0.0, 0.1), (0.05, 0.1), (-0.05, 0.1), (0.1, 0.02)])
def test_what_knowing_saves_is_expected_over_what_may_be_found(slower, spread):
    numbers = [(number + 0.5) / 4000 for number in range(4000)]
    drawn = [max(0.0, -(slower + spread * z)) for z in map(_normal.inv_cdf, numbers)]
    by_hand = sum(drawn) / len(drawn) - max(0.0, -slower)
    assert _saved(slower, spread) == pytest.approx(by_hand, abs=1e-4)
    assert _saved_by_kind([slower], [spread]) == pytest.approx(by_hand, abs=2e-3)


SMALL = TransformerShape(
    layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5504, vocab=32000, seq_len=2048, head_dim=128
)  # 1.3B parameters
LARGE = TransformerShape(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq_len=8192, head_dim=128
)  # 70B parameters


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What a ranking does inside: branches looked at, compositions scored among them, and estimates of what is kept."""
    work: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work[name] += 1
            return real(*args, **kwargs)

        return call

    looks, scores = counting("branches", Bounds.parts), counting("scores", CandidateTable.add)
    estimates = counting("estimates", rankings.estimate_of)
    with (
        mock.patch.object(Bounds, "parts", looks),
        mock.patch.object(CandidateTable, "add", scores),
        mock.patch.object(rankings, "estimate_of", estimates),
    ):
        yield work


@pytest.mark.parametrize(
    ("shape", "devices", "is_whole"),
    [
        (SMALL, "1xH100-80GB", True),
        pytest.param(SMALL, "8xH100-80GB", True, marks=pytest.mark.nightly),
        pytest.param(LARGE, "8x8xH100-80GB", True, marks=pytest.mark.nightly),
        (LARGE, "64x8xH100-80GB", False),
        pytest.param(LARGE, "64x8xH100-80GB", True, marks=pytest.mark.nightly),
    ],
    ids=["1", "8", "64", "512, a part", "512"],
)
def test_some_hundreds_are_kept_whatever_the_cluster(
    shape: TransformerShape, devices: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_whole:  # of the largest the default sample looks at fewer
        monkeypatch.setattr(rankings, "MOST_SCORED", 1_000)
        monkeypatch.setattr(rankings, "ALL_SCORED", 500)
    there = ClusterSpec.load(devices)
    profile = transformer_profile(shape, 1, Implementation(itemsize=4.0))
    start = plain_cost(profile, 4 * there.world_size, there.device.memory_bytes)
    with counted() as work:
        found = best_level(profile, start, there, SearchLimits())
    assert work["branches"] <= rankings.MOST_LOOKS
    assert work["scores"] <= 1.25 * rankings.MOST_SCORED, "of the last branch all is scored"
    assert work["estimates"] <= (RUNNABLE * 5 // 4 if work["branches"] else rankings.ALL_SCORED)
    assert 100 < len(found.fitting) <= RUNNABLE * 5 // 4
    assert found.num_compositions <= rankings.ALL_SCORED
    told = RankingSummary.of(found)
    assert len(pickle.dumps(told)) < 2_000 * found.num_compositions
    assert told.ranking(methods_of(SearchLimits().space(profile, there, "half"))) == found


@pytest.mark.nightly
def test_a_ranking_of_512_devices_holds_a_small_part_of_a_gibibyte() -> None:
    there = ClusterSpec.load("64x8xH100-80GB")
    profile = transformer_profile(LARGE, 1, Implementation(itemsize=4.0))
    start = plain_cost(profile, 4 * there.world_size, there.device.memory_bytes)
    tracemalloc.start()
    try:
        best_level(profile, start, there, SearchLimits())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most <= 2**27


def test_of_hundreds_that_promise_something_twelve_are_run() -> None:
    """Each that runs is a tenth faster than all before, so that there is always reason to try one more."""
    there = ClusterSpec.load("1xH100-80GB")
    profile = transformer_profile(SMALL, 1, Implementation(itemsize=4.0))
    fitting = best_level(profile, plain_cost(profile, 4, there.device.memory_bytes), there, SearchLimits()).fitting
    ran: list[Any] = []

    def measured(trial: Any, *_: Any) -> Measurement:
        ran.append(trial.strategy)
        return Measurement(step_s=0.9 ** len(ran), num_steps=5, startup_s=0.1, peak_bytes=1.0, memory_kind="none")

    def trial(strategy: Strategy, limit_s: float) -> Any:
        return SimpleNamespace(strategy=strategy, startup_s=0.1, elapsed_s=0.1, close=lambda: None)

    runs: Any = SimpleNamespace(refusal=lambda strategy: None, trial=trial)
    job = SearchJob(
        cluster=there,
        coordinator=Coordinator(context().world),
        candidates=fitting,
        clock=TimeBudget(1e6),
        starts=Starts("cuda"),
    )
    with mock.patch.object(dry_run_loop, "measure", measured), mock.patch.object(DryRunLoop, "_compare"):
        DryRunLoop(job).explore(runs)
    assert len(fitting) > 200
    assert 1 < len(set(ran)) == len(ran) <= MAX_RUNS + MAX_CONTENDERS


def test_a_guide_holds_no_more_than_candidates_times_what_was_seen() -> None:
    many = [scored([f"slot{slot}={i // 10**slot % 10}" for slot in range(4)], 1.0 + i) for i in range(5_000)]
    tracemalloc.start()
    try:
        guide = Surrogate(many)
        guide.observe(7, 2.0)
        assert int(guide.gains(7, np.zeros(1)).argmax()) == 0
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(many) ** 2 / 5, "each with each would be five times as much"


def told_apart(rank: int, size: int) -> str:
    """A search in which a method is registered on rank 0 alone."""
    try:
        if rank == 0:
            with sabotage("none", 0):
                find(context())
        else:
            find(context())
    except StrategyError as error:
        return str(error)
    return ""


def test_a_method_that_one_process_lacks_is_told_to_all(pool: Pool) -> None:
    first, second = pool.run(told_apart)
    assert first == second
    assert "which rank 1 does not have" in first


def test_a_small_space_is_scored_whole_and_the_nearest_miss_is_told() -> None:
    ctx = context()
    profile, start = starting_point(ctx, BatchCache(ctx))
    found = ranked(profile, start, cluster(), SearchLimits(excluded=["compile"]), "autocast")
    space = SearchLimits(excluded=["compile"]).space(profile, cluster(), "autocast")
    assert found.num_compositions == sum(1 for _ in space.leaves(space.root(start)))

    there = ClusterSpec.load("8xV100-16GB")
    profile = transformer_profile(LARGE, 1, Implementation(itemsize=4.0))
    found = ranked(profile, plain_cost(profile, 8), there, SearchLimits(excluded=["chunk", "offload"]), "autocast")
    assert not found.fitting
    assert any(each.strategy.names() != ("parallel_mode", "ddp") for each in found.rejected)


@pytest.mark.parametrize(
    ("wanted", "is_told"),
    [(SearchLimits(), True), (SearchLimits(precision="half"), False), (SearchLimits(excluded=["half"]), False)],
)
def test_what_16_bit_weights_would_gain_is_told_where_it_is_no_tie(wanted: SearchLimits, is_told: bool) -> None:
    there = ClusterSpec.load("1xH100-80GB")
    profile = transformer_profile(SMALL, 1, Implementation(itemsize=4.0))
    start = plain_cost(profile, 4, there.device.memory_bytes)
    taken, plain = (
        next(each for each in best_level(profile, start, there, SearchLimits()).fitting if test(each.strategy))
        for test in (lambda each: "amp_native" in each.names(), lambda each: "amp_native" not in each.names())
    )
    notes = list(gain_of_half(taken, profile, start, there, wanted))
    assert len(notes) == is_told
    assert all("% faster: precision='half'" in note for note in notes)
    assert not list(gain_of_half(plain, profile, start, there, wanted))
