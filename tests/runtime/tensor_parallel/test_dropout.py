"""Which split regions draw random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.derive import derive
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, apart
from atorch.runtime.tensor_parallel.split import with_draws


class Experts(nn.Module):
    """Experts as modules, of which a sample reaches one; they have dropout or none."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(4, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 4)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            x = x.index_add(0, rows, self.experts[number](x[rows]))
        return x


def test_experts_that_a_call_does_not_reach_may_draw() -> None:
    torch.manual_seed(0)
    call = ForwardCall((torch.randn(2, 4),), {})
    drawing, quiet = (
        with_draws(twin, derive(twin, call, 2), call) for twin in map(apart, (Experts(0.5), Experts(0.0)))
    )
    assert len(drawing.groups) > 2  # more than one draw of weights reaches
    assert all(group.draws for group in drawing.groups)
    assert {group.draws for group in quiet.groups} == {True, False}
