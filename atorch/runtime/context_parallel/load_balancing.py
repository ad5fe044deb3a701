"""The tokens of a sequence that a rank has, and the blocks of queries and keys that it computes at each hop.

In order, rank r of n has the r-th of n pieces; under a causal mask the last rank then has almost twice the mean work.
Balanced, a sequence has 2n pieces, and rank r has pieces r and 2n-1-r. Every rank then computes half a square of scores
with the keys of any other rank (Brandon et al. 2023, arXiv 2311.09431; Llama 3, arXiv 2407.21783, 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Deal:
    """The assignment of a sequence's tokens to `size` ranks."""

    size: int
    balanced: bool

    @property
    def pieces_each(self) -> int:
        return 2 if self.balanced else 1

    @property
    def num_pieces(self) -> int:
        return self.size * self.pieces_each

    def pieces(self, rank: int) -> tuple[int, ...]:
        """The pieces of a rank, ascending."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def tokens(self, rank: int, length: int) -> Tensor:
        """Positions of a rank's tokens in a sequence of `length` tokens, in the rank's own order."""
        by_piece = torch.arange(length).reshape(self.num_pieces, -1)
        return by_piece[list(self.pieces(rank))].flatten()


@dataclass(frozen=True)
class QueryKeyBlock:
    """Slices of a rank's queries and of the keys that it holds, and the mask between them."""

    rows: slice
    columns: slice
    is_causal: bool = False
    of_mask: tuple[slice, slice] | None = None  # the block's slices of the full mask; None: not needed

    def part_of(self, mask: Tensor | None) -> Tensor | None:
        """The block's part of the full sequences' mask, which has four dims; None if it needs none."""
        if mask is None or self.of_mask is None:
            return None
        rows, columns = self.of_mask
        return mask[:, :, rows, columns]


RingOrder = Sequence[Sequence[QueryKeyBlock]]
"""The blocks of every hop: at hop h, rank r holds the keys of rank r - h."""


def schedule(
    deal: Deal, rank: int, num_queries: int, num_keys: int, mask: Tensor | None = None, is_causal: bool = False
) -> RingOrder:
    """The blocks of a rank, by hop; every rank has `num_queries` queries and `num_keys` keys.

    mask: of the full sequences, (…, 1 or size × num_queries, size × num_keys), in sequence order.
    """
    sources = [(rank - hop) % deal.size for hop in range(deal.size)]
    if mask is not None:
        return [_masked(deal, rank, source, num_queries, num_keys, mask) for source in sources]
    if is_causal:
        return [_causal(deal, rank, source, num_queries) for source in sources]
    return [[QueryKeyBlock(slice(0, num_queries), slice(0, num_keys))] for _ in sources]


def _causal(deal: Deal, rank: int, source: int, length: int) -> list[QueryKeyBlock]:
    """Blocks in which queries see earlier pieces of the sequence, and no later ones."""
    everything = slice(0, length)
    if source == rank:
        return [QueryKeyBlock(everything, everything, is_causal=True)]
    if not deal.balanced:
        return [QueryKeyBlock(everything, everything)] if source < rank else []
    front, back = slice(0, length // 2), slice(length // 2, length)
    return [QueryKeyBlock(everything, front)] if source < rank else [QueryKeyBlock(back, everything)]


def _masked(deal: Deal, rank: int, source: int, num_queries: int, num_keys: int, mask: Tensor) -> list[QueryKeyBlock]:
    """Blocks by pieces: fully masked ones are skipped, and fully visible ones carry no mask."""
    blocks = []
    for rows, mask_rows in _places(deal, rank, num_queries, mask, -2):
        for columns, mask_columns in _places(deal, source, num_keys, mask, -1):
            part = mask[..., mask_rows, mask_columns]
            is_bool = part.dtype is torch.bool
            if bool((part if is_bool else part == 0).all()):
                blocks.append(QueryKeyBlock(rows, columns))
            elif bool((part if is_bool else part > -torch.inf).any()):
                blocks.append(QueryKeyBlock(rows, columns, of_mask=(mask_rows, mask_columns)))
    return blocks


def _places(deal: Deal, rank: int, length: int, mask: Tensor, dim: int) -> list[tuple[slice, slice]]:
    """Slices of a rank's pieces among its own tokens and in the mask; one pair if the mask is constant along `dim`."""
    if mask.shape[dim] == 1 or mask.stride(dim) == 0:
        return [(slice(0, length), slice(0, 1))]
    piece = length // deal.pieces_each
    return [
        (slice(place * piece, (place + 1) * piece), slice(number * piece, (number + 1) * piece))
        for place, number in enumerate(deal.pieces(rank))
    ]
