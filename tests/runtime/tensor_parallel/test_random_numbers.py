"""Streams of random numbers: apart inside a region, together outside, the same again from the same state."""

from __future__ import annotations

import torch

from atorch.distributed.rng import RankStream, preserved_rng

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
