"""Models that reach their modules by closures, hooks and the like train under chunk and others as in torch alone."""

from __future__ import annotations

import pytest
import torch

from tests.auto.training import assert_trains_like_plain
from tests.pool import Pool
from tests.roads import ROADS, deviation, net, trained, trained_plainly

TIGHT = ("chunk", {"budget_bytes": 30_000})
WIDE = ("chunk", {"budget_bytes": 10**9})


@pytest.mark.parametrize("road", ROADS)
def test_chunk_trains_as_torch_does(road: str) -> None:
    assert deviation(0, 1, [WIDE], road) <= 1e-6


@pytest.mark.slow
def test_chunk_trains_as_torch_does_on_one_or_two_processes_with_little_room(pool: Pool) -> None:
    assert deviation(0, 1, [TIGHT], "ByHook") <= 1e-6
    assert_trains_like_plain(pool, deviation, [([TIGHT], road) for road in ROADS], band=1e-5)


def stage_under_autocast(rank: int, size: int) -> dict[str, float]:
    """How far each parameter of a stage is off after the epoch, as a share of how far all moved."""
    strategy = [("parallel_mode", [("pipeline", size)]), ("amp_native", "bf16"), "pipeline_parallel"]
    before, expected = net("ByHook").state_dict(), trained_plainly(net("ByHook"))
    found = trained(strategy, "ByHook")
    moved = torch.cat([(each - before[name]).flatten() for name, each in expected.items()]).norm()
    return {name: float((each - expected[name]).norm() / moved) for name, each in found.items()}


def test_a_pipeline_under_autocast_is_cut_between_modules_that_share_a_weight(pool: Pool) -> None:
    first, last = pool.run(stage_under_autocast)
    assert first.keys() & last.keys() == {"embed.weight"}
    assert max(*first.values(), *last.values()) <= 0.02
