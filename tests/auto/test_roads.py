"""Models that reach their modules by closures, hooks and the like train as in torch, and searches leave them alone."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from atorch.auto.job import make_context
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.dry_runs.trial import BatchCache
from atorch.auto.planner.planner import dry_run
from atorch.auto.reference_step import plain_pass
from atorch.auto.strategy import Strategy
from atorch.distributed import world as worlds
from atorch.errors import StrategyError
from tests.auto.planner.jobs import cluster
from tests.auto.planner.test_search import assert_same, snapshot
from tests.auto.training import assert_trains_like_plain
from tests.pool import Pool
from tests.roads import ROADS, deviation, job, net, trained, trained_plainly

TIGHT = ("chunk", {"budget_bytes": 30_000})
WIDE = ("chunk", {"budget_bytes": 10**9})
SAMPLE = ("ByLambda", "ByHook")
METHODS: dict[int, list[list[Any]]] = {
    1: [["checkpoint"], ["module_replace"], [TIGHT]],
    2: [["ddp"], ["fsdp"], ["zero1", "checkpoint"]],
}


@pytest.mark.parametrize("road", ROADS)
def test_chunk_trains_as_torch_does(road: str) -> None:
    assert deviation(0, 1, [WIDE], road) <= 1e-6


@pytest.mark.slow
def test_chunk_trains_as_torch_does_on_one_or_two_processes_with_little_room(pool: Pool) -> None:
    assert deviation(0, 1, [TIGHT], "ByHook") <= 1e-6
    assert_trains_like_plain(pool, deviation, [([TIGHT], road) for road in ROADS], band=1e-5)


def stage_under_autocast(rank: int, size: int) -> dict[str, float]:
    """The distance of each parameter of a stage after the epoch, as a share of the way that all moved."""
    strategy = [("parallel_mode", [("pipeline", size)]), ("amp_native", "bf16"), "pipeline_parallel"]
    before, expected = net("ByHook").state_dict(), trained_plainly(net("ByHook"))
    found = trained(strategy, "ByHook")
    moved = torch.cat([(each - before[name]).flatten() for name, each in expected.items()]).norm()
    return {name: float((each - expected[name]).norm() / moved) for name, each in found.items()}


def test_a_pipeline_under_autocast_is_cut_between_modules_that_share_a_weight(pool: Pool) -> None:
    first, last = pool.run(stage_under_autocast)
    assert first.keys() & last.keys() == {"embed.weight"}
    assert max(*first.values(), *last.values()) <= 0.02


def tried(rank: int, size: int, roads: Iterable[str]) -> dict[str, str]:
    """What fails of dry runs of several methods, each held to plain training; after each all is as it was."""
    failed = {}
    for road in roads:
        model = net(road)
        before, state = snapshot(model), torch.get_rng_state()
        ctx = make_context(model, **job(), world=worlds.init("cpu"), cluster=cluster(size))
        expected = plain_pass(ctx, size, lambda ctx=ctx: BatchCache(ctx, num_batches=1).batches(0, 1)[0])
        assert expected.why_not is None
        for methods in METHODS[size]:
            strategy = complete(Strategy.of(methods), size)
            try:
                dry_run(replace(ctx, plain_pass=expected), strategy)
            except StrategyError as error:
                failed[f"{road} under {strategy}"] = str(error)
            assert_same(before, snapshot(model))
            assert torch.equal(torch.get_rng_state(), state)
    return failed


@pytest.mark.parametrize(
    "road", [*SAMPLE, *(pytest.param(r, marks=pytest.mark.nightly) for r in ROADS if r not in SAMPLE)]
)
def test_dry_runs_leave_the_model_as_it_was(road: str) -> None:
    assert tried(0, 1, [road]) == {}


def test_dry_runs_of_two_processes_leave_the_model_as_it_was(pool: Pool) -> None:
    assert pool.run(tried, SAMPLE[:1]) == [{}, {}]


@pytest.mark.nightly
def test_dry_runs_of_two_processes_by_all_roads(pool: Pool) -> None:
    for failed in pool.run(tried, list(ROADS)):
        ((what, why),) = failed.items()
        assert what.startswith("ByParameter under")
        assert what.endswith("fsdp")
        assert "atorch_ignored_cls=('blocks.0.mlp.fc.weight',)" in why
