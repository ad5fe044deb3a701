"""How parameters are cut for an optimizer, on the host and on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atorch.runtime.chunk import optimizer_slices

NUMEL = 3 * 2**24


def lengths(device: str, fused: bool) -> list[int]:
    """Of the pieces of a large parameter."""
    chunk: Any = SimpleNamespace(
        master=torch.empty(NUMEL, device=device),
        share=slice(0, NUMEL),
        within=lambda _: slice(0, NUMEL),
        forms={"weight": SimpleNamespace(shape=(NUMEL,))},
    )
    slot: Any = SimpleNamespace(name="weight", offset=0, numel=NUMEL)
    return [piece.numel for piece in optimizer_slices.cut(chunk, slot, 0, fused)]


@pytest.mark.parametrize("fused", [False, True])
def test_caches_decide_on_the_host_and_calls_on_a_device(fused: bool) -> None:
    """With 26 µs of Python a piece, and pieces of a host's caches, 8 billion parameters took 0.8 s a step."""
    on_host, on_device = lengths("cpu", fused), lengths("meta", fused)
    assert set(on_host) == {2**19 if fused else 2**18}
    assert sum(on_host) == sum(on_device) == NUMEL
    assert 8e9 / max(on_device) * 26e-6 < 0.02
    assert 4 * max(on_device) <= 2**26, "fp32 gradients of a piece are room beside the budget"
