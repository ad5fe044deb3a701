"""Models that reach their modules by closures, hooks and the like train under chunk and others as in torch alone."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.roads import ROADS, deviation

TIGHT = ("chunk", {"budget_bytes": 30_000})
WIDE = ("chunk", {"budget_bytes": 10**9})


@pytest.mark.parametrize("budget", [TIGHT, WIDE], ids=["tight", "wide"])
@pytest.mark.parametrize("road", ROADS)
def test_chunk_trains_as_torch_does(road: str, budget: object) -> None:
    assert deviation(0, 1, [budget], road) <= 1e-6


def every_road(rank: int, size: int) -> dict[str, float]:
    return {road: deviation(rank, size, [TIGHT], road) for road in ROADS}


def test_chunk_trains_as_torch_does_on_two_processes(pool: Pool) -> None:
    for found in pool.run(every_road):
        assert {road: off for road, off in found.items() if off > 1e-5} == {}
