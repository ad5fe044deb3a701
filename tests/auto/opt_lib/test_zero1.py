"""zero1 through the front door, with each of its backends."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.opt_lib.zero1 import Zero1
from atorch.errors import CapabilityError
from tests.auto.opt_lib.sharing_job import accelerated
from tests.pool import Pool


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


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fairscale", None)
    monkeypatch.setitem(__import__("sys").modules, "deepspeed", None)
    for backend in ("fairscale", "deepspeed"):
        with pytest.raises(CapabilityError, match=f"pip install {backend}"):
            Zero1(backend=backend).unmet(None)  # type: ignore[arg-type]
