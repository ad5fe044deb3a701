"""Every token has one rank, every score is computed once, and balanced ranks have equally much to do."""

import pytest
import torch
from torch import Tensor

from atorch.runtime.context_parallel.load_balancing import QueryKeyBlock, TokenAssignment, schedule

LENGTH = 24
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WINDOW = CAUSAL & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-4)
PADDED = torch.arange(LENGTH).expand(3, 1, 1, LENGTH) >= torch.tensor([0, 5, 12])[:, None, None, None]

deals = pytest.mark.parametrize("deal", [TokenAssignment(n, balanced) for n in (2, 3, 4) for balanced in (False, True)])


def num_scores(meeting: QueryKeyBlock) -> float:
    square = (meeting.rows.stop - meeting.rows.start) * (meeting.columns.stop - meeting.columns.start)
    return square / 2 if meeting.is_causal else float(square)


def computed(deal: TokenAssignment, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, list[float]]:
    """How often each query meets each key, (batch, heads, queries, keys), and the scores each rank computes."""
    met = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.long)
    work = []
    each = LENGTH // deal.size
    for rank in range(deal.size):
        hops = schedule(deal, rank, each, each, mask, is_causal)
        work.append(sum(num_scores(meeting) for hop in hops for meeting in hop))
        for hop, meetings in enumerate(hops):
            rows, columns = deal.tokens(rank, LENGTH), deal.tokens((rank - hop) % deal.size, LENGTH)
            for meeting in meetings:
                here = rows[meeting.rows, None], columns[None, meeting.columns]
                seen = torch.ones(here[0].numel(), here[1].numel(), dtype=torch.long)
                seen = seen.tril() if meeting.is_causal else seen
                part = meeting.part_of(mask)
                seen = seen if part is None else seen * part
                met = met.expand(*torch.broadcast_shapes(met.shape[:2], seen.shape[:-2]), -1, -1).clone()
                met[..., here[0], here[1]] += seen
    return met, work


def test_balanced_ranks_have_a_piece_from_the_front_and_one_from_the_back() -> None:
    deal = TokenAssignment(3, balanced=True)
    assert [deal.pieces(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert deal.tokens(1, 12).tolist() == [2, 3, 8, 9]


@deals
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(CAUSAL, id="causal"),
        pytest.param(WINDOW, id="window"),
        pytest.param(PADDED, id="padded"),
        pytest.param(PADDED.expand(-1, -1, LENGTH, -1), id="padded, expanded"),
        pytest.param(PADDED & CAUSAL, id="padded and causal"),
    ],
)
def test_a_query_meets_what_the_mask_lets_it_see_once(deal: TokenAssignment, mask: Tensor) -> None:
    four = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    met, _ = computed(deal, four, is_causal=False)
    assert met.equal(four.long().expand(met.shape))
    one = four[:, :, :1] if four.stride(2) == 0 else four
    added = torch.zeros(one.shape).masked_fill(~one, -torch.inf).expand(four.shape)
    pieces = [schedule(deal, 0, LENGTH // deal.size, LENGTH // deal.size, each) for each in (four, added)]
    assert pieces[0] == pieces[1]


@deals
def test_every_token_has_one_rank_and_balanced_ranks_do_equally_much_at_every_hop(deal: TokenAssignment) -> None:
    tokens = torch.cat([deal.tokens(rank, LENGTH) for rank in range(deal.size)])
    assert tokens.sort().values.equal(torch.arange(LENGTH))
    met, work = computed(deal, None, is_causal=True)
    assert met[0, 0].equal(CAUSAL.long())
    each, whole = LENGTH // deal.size, LENGTH * LENGTH / 2
    hops = [schedule(deal, rank, each, each, is_causal=True) for rank in range(deal.size)]
    by_hop = {tuple(sum(num_scores(m) for m in meetings) for meetings in rank) for rank in hops}
    assert (len(by_hop) == 1) == deal.balanced
    if deal.balanced:
        assert work == [whole / deal.size] * deal.size
    else:  # what the cost of context_parallel counts
        assert work == sorted(work)
        assert work[0] < work[-1] == whole * (2 * deal.size - 1) / deal.size**2


def test_a_mask_is_computed_with_only_where_it_is_mixed_and_lengths_may_differ() -> None:
    hops = schedule(TokenAssignment(2, balanced=True), 0, 12, 12, CAUSAL[None, None])
    shown = [[(m.rows.start, m.columns.start, m.of_mask is not None) for m in hop] for hop in hops]
    assert shown == [[(0, 0, True), (6, 0, False), (6, 6, True)], [(6, 0, False), (6, 6, False)]]
    hops = schedule(TokenAssignment(2, balanced=True), 1, 6, 10)
    assert [[(m.rows, m.columns) for m in hop] for hop in hops] == [[(slice(0, 6), slice(0, 10))]] * 2
