"""Models of many kinds, cut into stages, train as they do on one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool
from tests.runtime.pipeline.job import train

KINDS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "twice", "frozen")


def stages(number: int = 2, data: int = 1, **knobs: Any) -> list[Any]:
    axes = [("pipeline", number)] + [("data", data)] * (data > 1)
    return [("parallel_mode", (axes, None)), ("pipeline_parallel", knobs)]


def as_plain(rank: int, size: int, name: str, strategy: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    return train(name, strategy, **more)


def check(pool: Pool, name: str, strategy: list[Any], ranks: int = 2, band: float = 1e-4, **more: Any) -> list[Any]:
    found = pool.run(as_plain, name, strategy, more, ranks=ranks)
    for each in found:
        assert each["update"] <= band
        assert each["loss"] <= max(1e-5, band / 10)
        assert each["norm"] <= band
    assert sorted({key for each in found for key in each["names"]}) == found[0]["all"], "every parameter is somewhere"
    return found


@pytest.mark.parametrize("name", KINDS)
def test_trains_as_on_one_process(pool: Pool, name: str) -> None:
    found = check(pool, name, stages(micro_batches=4), accumulate=2)
    assert all(len(each["names"]) < len(each["all"]) for each in found), "a stage has its own parameters alone"
