"""Offloading that is seen on a CPU."""

from typing import Any

import pytest
from torch import Tensor

from atorch.runtime.memory import recompute


@pytest.fixture(autouse=True)
def _host_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator `.to("cpu")` copies nothing; a clone makes the offloaded input a tensor of its own."""

    def to_host(tensor: Tensor) -> Any:
        kept, device, version = moved(tensor)
        return (kept, device, version) if tensor.is_leaf else (kept.clone(), device, 0)

    moved = recompute._to_host
    monkeypatch.setattr(recompute, "_to_host", to_host)
