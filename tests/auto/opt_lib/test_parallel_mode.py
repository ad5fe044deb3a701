"""The documented configurations of parallel_mode, and what happens to them on other numbers of processes."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import complete, idle_axes
from atorch.auto.strategy import Strategy
from atorch.cost import plain_cost
from atorch.distributed import parallel_group_size, parallel_rank
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import PROFILE
from tests.pool import Pool


def slices_of(config: Any, world_size: int) -> list[tuple[str, int]]:
    return list(ParallelMode.of(config).resized(world_size).slices)


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        (None, 16, [("data", 16)]),
        (([("data", 8)], None), 16, [("data", 16)]),
        (([("tensor", 2), ("pipeline", 2), ("data", 2)], None), 16, [("tensor", 2), ("pipeline", 2), ("data", 4)]),
        ([("tensor", 4)], 8, [("tensor", 4), ("data", 2)]),
        ([["zero", 2], ["data", 2]], 4, [("zero", 2), ("data", 2)]),
        (([("tensor", 4)], None), 4, [("tensor", 4)]),
    ],
)
def test_data_is_resized_to_fill_the_world(config: Any, world_size: int, expected: list[tuple[str, int]]) -> None:
    assert slices_of(config, world_size) == expected


def test_sizes_that_do_not_divide_the_world_are_refused_with_sizes_that_do() -> None:
    with pytest.raises(
        StrategyError, match=r"tensor 3 × pipeline 2 = 6, which does not divide 8 processes. Use tensor 2"
    ):
        slices_of([("tensor", 3), ("pipeline", 2)], 8)
    with pytest.raises(StrategyError, match=r"Start 4 processes \(torchrun .*\) or a multiple. Else use tensor 1"):
        slices_of([("tensor", 4)], 1)


def test_a_rank_order_must_be_a_permutation_of_the_world() -> None:
    assert ParallelMode.of(([("data", 2)], [1, 0])).resized(2).rank_order == (1, 0)
    with pytest.raises(StrategyError, match="rank_order"):
        ParallelMode.of(([("data", 2)], [0, 1])).resized(4)


class TestCompletion:
    def test_one_process_needs_nothing(self) -> None:
        assert complete(Strategy(), 1) == Strategy()

    def test_several_processes_mean_all_data_and_ddp(self) -> None:
        assert complete(Strategy(), 4) == Strategy.of([("parallel_mode", ([("data", 4)], None)), "ddp"])

    def test_a_method_that_shards_stays_alone(self) -> None:
        assert complete(Strategy.of(["fsdp"]), 2).names() == ("parallel_mode", "fsdp")

    def test_ddp_is_not_added_where_nothing_is_replicated(self) -> None:
        assert complete(Strategy.of([("parallel_mode", [("tensor", 2)])]), 2).names() == ("parallel_mode",)

    def test_another_world_size_changes_the_data_axis_alone(self) -> None:
        saved = complete(Strategy.of([("parallel_mode", [("zero", 2), ("data", 2)]), "fsdp"]), 4)
        mode = complete(saved, 8).get(ParallelMode)
        assert mode is not None
        assert mode.slices == (("zero", 2), ("data", 4))
        with pytest.raises(StrategyError, match="does not divide 3 processes"):
            complete(saved, 3)


def places(rank: int, size: int, order: list[int] | None) -> tuple[int, int, int]:
    from atorch.auto.job import make_context
    from atorch.cluster.spec import ClusterSpec
    from atorch.distributed.world import init
    from tests.contract.job import make_model

    world = init()
    ctx = make_context(make_model(), world=world, cluster=ClusterSpec.detect(world, measure=False))
    ParallelMode.of(([("tensor", 2), ("data", 2)], order)).apply(ctx)
    return parallel_rank("tensor"), parallel_rank("data"), parallel_group_size("data")


def test_the_groups_of_the_current_mesh(pool: Pool) -> None:
    assert pool.run(places, None, ranks=4) == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]
    assert pool.run(places, [0, 2, 1, 3], ranks=4) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


def test_axes_that_nothing_splits_over_are_named() -> None:
    strategy = Strategy.of([("parallel_mode", [("tensor", 2), ("data", 2)]), "ddp"])
    assert idle_axes(strategy) == [("tensor", 2)]
    assert idle_axes(Strategy.of([("parallel_mode", [("zero", 2)]), "fsdp"])) == []


def test_samples_are_shared_out_evenly() -> None:
    mode = ParallelMode.of([("tensor", 2), ("zero", 2), ("data", 4)])
    assert mode.unfit(plain_cost(PROFILE, 16)) is None
    assert mode.unfit(plain_cost(PROFILE, 12)) == "12 samples are not shared out evenly over 8 processes"
