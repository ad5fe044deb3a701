"""ddp through the front door: awkward models, clipping, unused parameters, and several axes of samples."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.opt_lib.ddp import Ddp
from atorch.errors import StrategyError
from atorch.runtime.data_parallel.replicate import Replicated
from tests.auto.opt_lib.sharing_job import accelerated, deviation
from tests.pool import Pool


@pytest.mark.parametrize("name", ["awkward", "llama", "lora"])
def test_trains_and_clips_as_one_process_does(pool: Pool, name: str) -> None:
    assert max(pool.run(deviation, ["ddp"], name, True)) <= 1e-4


def test_replicates_over_data_and_zero(pool: Pool) -> None:
    mesh = ("parallel_mode", ([("data", 2), ("zero", 2)], None))
    assert max(pool.run(deviation, [mesh, "ddp"], "awkward", ranks=4)) <= 1e-4


def knobs(rank: int, size: int, config: Any, more: dict[str, Any]) -> tuple[bool, bool, int]:
    model = accelerated([("ddp", config)], "awkward", **more).model
    assert isinstance(model, Replicated)
    replicas = model.replicas
    return replicas.find_unused_parameters, replicas.static_graph, replicas.bucket_bytes_cap


@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        (None, {}, (False, False, 25)),
        ({"find_unused_parameters": True, "bucket_cap_mb": 1}, {}, (True, False, 1)),
        (None, {"find_unused_parameters": True}, (True, False, 25)),
        ({"static_graph": True}, {}, (False, True, 25)),
    ],
)
def test_knobs_reach_torch(pool: Pool, config: Any, more: dict[str, Any], expected: tuple[bool, bool, int]) -> None:
    unused, static, mib = expected
    assert pool.run(knobs, config, more) == [(unused, static, mib * 2**20)] * 2


def test_what_does_not_hold_is_refused() -> None:
    with pytest.raises(StrategyError, match="did you mean 'static_graph'"):
        Ddp.of({"static_grap": True})
    with pytest.raises(StrategyError, match="bucket_cap_mb"):
        Ddp.of({"bucket_cap_mb": 0})
