"""zero1 through the front door, with each of its backends."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.opt_lib.zero1 import Zero1
from atorch.errors import CapabilityError, StrategyError
from tests.auto.opt_lib.sharing_job import accelerated, deviation
from tests.contract.job import deviation as contract_deviation
from tests.pool import Pool


@pytest.mark.parametrize("name", ["awkward", "llama", "lora"])
@pytest.mark.parametrize("backend", ["torch", "fairscale"])
def test_trains_and_clips_as_one_process_does(pool: Pool, backend: str, name: str) -> None:
    assert max(pool.run(deviation, [("zero1", {"backend": backend})], name, True)) <= 1e-4


def test_shares_over_data_and_zero(pool: Pool) -> None:
    mesh = ("parallel_mode", ([("data", 2), ("zero", 2)], None))
    assert max(pool.run(deviation, [mesh, "zero1"], "awkward", True, ranks=4)) <= 1e-4


@pytest.mark.parametrize("precision", ["amp_native", "half"])
def test_fp16_steps_together(pool: Pool, precision: str) -> None:
    for update_error, _ in pool.run(contract_deviation, [precision, "zero1"]):
        assert update_error <= 5e-2


def held(rank: int, size: int) -> tuple[int, int]:
    result = accelerated(["zero1"], "llama")
    for batch in result.dataloader:
        result.step(batch)
    states = sum(state["momentum_buffer"].numel() for state in result.optim.state.values() if state)
    return states, sum(p.numel() for p in result.model.parameters())


def test_each_process_holds_its_share_of_the_state(pool: Pool) -> None:
    (first, total), (second, _) = pool.run(held)
    assert first + second == total
    assert 0 < first < total


def test_one_process_trains(pool: Pool) -> None:
    assert pool.run(deviation, ["zero1"], "awkward", ranks=1)[0] <= 1e-4


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        (None, "torch"),
        ({"use_ds_zero": True}, "deepspeed"),
        ({"use_ds_zero": False}, "torch"),
        ({"backend": "fairscale"}, "fairscale"),
    ],
)
def test_documented_configurations(config: Any, backend: str) -> None:
    assert Zero1.of(config).backend == backend


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_ds_zero", True}, "write the dict {'use_ds_zero': True}"),
        ({"use_ds_zero": True, "backend": "fairscale"}, "give one"),
        ({"backend": "apex"}, "backend"),
        ({"atorch_wrap_cls": "Block"}, "no knob 'atorch_wrap_cls'"),
    ],
)
def test_what_does_not_hold_is_refused(config: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Zero1.of(config)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fairscale", None)
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    for backend in ("fairscale", "deepspeed"):
        with pytest.raises(CapabilityError, match=f"pip install {backend}"):
            Zero1(backend=backend).unmet(None)  # type: ignore[arg-type]
