"""A pass is traced alike before a model is in chunks and after."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.pass_schedule import AccessTrace, PassSchedule


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


class Reading(nn.Module):
    """Weights that are read twice, a bias, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, batch: Tensor) -> Tensor:
        return self.first(self.second(torch.tanh(self.first(batch))) * self.scale)


@pytest.mark.parametrize("for_real", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_in_chunks_is_foreseen_as_it_was(dtype: torch.dtype | None, for_real: bool) -> None:
    model, batch = Reading(), torch.randn(4, 32).to(dtype or torch.float32)
    before = trace_pass(model, batch, loss, device_type="cpu", dtype=dtype)
    operations = chunk(model, before, 10**6, device=torch.device("cpu"), dtype=dtype)
    seen: list[AccessTrace] = []

    def again() -> PassSchedule:
        seen.append(trace_pass(model, batch, loss, device_type="cpu", dtype=dtype, for_real=for_real))
        return operations.residency.pass_schedule

    operations.schedule_for = again
    loss(model, batch).backward()
    assert seen == [before]
    assert before.accesses


def test_a_real_run_has_the_values_and_leaves_the_model_as_it_was() -> None:
    model, batch = Reading(), torch.randn(4, 32)
    expected = loss(model, batch).item()
    operations = chunk(
        model, trace_pass(model, batch, loss, device_type="cpu", for_real=True), 10**6, device=torch.device("cpu")
    )

    def looking(duplicate: nn.Module, batch: Tensor) -> Tensor:
        value = loss(duplicate, batch)
        if value.item() != expected:  # no fake has a value
            raise ValueError(f"{value.item()} is not {expected}")
        return value

    with pytest.raises(ArgumentError, match="fake tensors"):
        trace_pass(model, batch, looking, device_type="cpu")
    assert trace_pass(model, batch, looking, device_type="cpu", for_real=True).gradients
    assert all(each.grad is None for each in model.parameters())
    assert operations.residency.fetched_bytes == 0

    with pytest.raises(ArgumentError, match="meta device"):
        trace_pass(Reading().to("meta"), torch.randn(4, 32), loss, device_type="cpu", for_real=True)
