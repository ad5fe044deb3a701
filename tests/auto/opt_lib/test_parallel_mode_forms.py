"""parallel_mode and lists of methods as original scripts write them."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.strategy import Strategy
from atorch.distributed import rank_table
from atorch.errors import StrategyError

SLICES = [("tensor", 2), ("pipe", 2), ("data", 2)]


@pytest.mark.parametrize(
    "config", [(SLICES, None, False), (SLICES, None, False, True), (SLICES, None), (SLICES,), SLICES]
)
def test_three_and_four_entries_and_the_axis_pipe(config: Any) -> None:
    expected = Strategy.of([("parallel_mode", ([("tensor", 2), ("pipeline", 2), ("data", 2)], None))])
    assert Strategy.of([("parallel_mode", config)]) == expected
    assert Strategy.of([("parallel_mode", {"slices": SLICES})]) == expected


def test_triples() -> None:
    given = [("parallel_mode", None, False), ("amp_native", {"dtype": "bf16"}, False), ["checkpoint", None, True]]
    assert Strategy.of(given) == Strategy.of(["parallel_mode", ("amp_native", {"dtype": "bf16"}), "checkpoint"])
    with pytest.raises(StrategyError, match="is no method"):
        Strategy.of([("checkpoint", None, "yes")])
    with pytest.raises(StrategyError, match=r"For one method and its configuration, give \[\('amp_native'"):
        Strategy.of(("amp_native", {"dtype": "bf16"}, False))


def test_several_instances_of_a_mesh() -> None:
    slices = [("tensor", 2), ("data", 2)]
    assert rank_table(slices, 8, instances=True) == {
        "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }
    assert rank_table(slices, 4, instances=True) == rank_table(slices, 4)
    with pytest.raises(StrategyError, match="multiply to that"):
        rank_table(slices, 8)
    with pytest.raises(StrategyError, match="multiply to that"):
        rank_table(slices, 6, instances=True)


@pytest.mark.parametrize("given", [None, "data", [("data", 2), "pipe"], (SLICES, None), [("data",)]])
def test_what_is_no_mesh_is_told(given: Any) -> None:
    with pytest.raises(StrategyError, match=r"takes \[\(name, size\), …\]"):
        rank_table(given, 2)
