"""Streams of random numbers: apart inside a region, together outside, the same again; and who draws of them."""

import torch
from torch import Tensor, nn

from atorch.distributed.rng import RankStream, preserved_rng
from atorch.runtime.tensor_parallel import with_draws
from atorch.runtime.tensor_parallel.derive import derive
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, sandboxed


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
        with_draws(twin, derive(twin, call, 2), call) for twin in map(sandboxed, (Experts(0.5), Experts(0.0)))
    )
    assert len(drawing.groups) > 2  # more than one draw of weights reaches
    assert all(group.draws for group in drawing.groups)
    assert {group.draws for group in quiet.groups} == {True, False}


CPU = torch.device("cpu")


def drawn(rank: int, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Two regions of one rank, and what is drawn after them."""
    stream = RankStream(rank)
    with preserved_rng():
        torch.manual_seed(seed)
        regions = []
        for _ in range(2):
            stream.enter(CPU)
            regions.append(torch.rand(4).tolist())
            stream.leave()
        return regions[0], regions[1], torch.rand(4).tolist()


def test_ranks_differ_inside_and_agree_outside() -> None:
    first, second = drawn(0, 7), drawn(1, 7)
    assert len({tuple(region) for region in (*first[:2], *second[:2])}) == 4
    assert first[2] == second[2]


def test_the_same_state_draws_the_same() -> None:
    assert drawn(1, 7) == drawn(1, 7)
    assert drawn(1, 7)[0] != drawn(1, 8)[0]


def test_an_entry_without_an_exit_does_no_harm() -> None:
    """A recompute stops as soon as it has what backward needs, which may be inside the region."""
    stream = RankStream(0)
    with preserved_rng():
        torch.manual_seed(7)
        state = torch.get_rng_state()
        stream.enter(CPU)
        torch.set_rng_state(state)
        stream.enter(CPU)
        stream.leave()
        after = torch.rand(4).tolist()
        torch.set_rng_state(state)
        stream.enter(CPU)
        stream.leave()
        assert torch.rand(4).tolist() == after
