"""The attention of a block handed to a chain, which copies and recomputations take along."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.runtime.memory.recompute import checkpoint_wrapper
from atorch.runtime.sequence_parallel.attention import Attend, AttentionCall, exchange_attention, watching


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        return F.scaled_dot_product_attention(x, x, value=x, is_causal=True)


def noting(notes: list[Any], name: str, call: AttentionCall, attend: Attend) -> Tensor:
    notes.append((name, call.is_causal))
    return attend(call) + 1


def test_the_last_added_is_called_first_and_nobody_outside_of_the_block_is() -> None:
    block, notes = Block(), []
    x = torch.randn(1, 2, 3, 4)
    before = block(x)
    exchange_attention(block, partial(noting, notes, "first"))
    exchange_attention(block, partial(noting, notes, "second"))
    torch.testing.assert_close(block(x), before + 2)
    assert notes == [("second", True), ("first", True)]
    F.scaled_dot_product_attention(x, x, x)
    assert len(notes) == 2


def test_recomputations_and_copies_do_it_too_and_watching_leaves_the_block_as_it_was() -> None:
    block, notes = Block(), []
    with watching(block, partial(noting, notes, "watch")):
        block(torch.randn(1, 2, 3, 4))
    assert len(notes) == 1
    assert type(block) is Block
    assert vars(block).keys() == vars(Block()).keys()
    exchange_attention(block, partial(noting, notes, "one"))
    checkpoint_wrapper(block)
    block(torch.randn(1, 2, 3, 4, requires_grad=True)).sum().backward()
    assert len(notes) == 3
    copy.deepcopy(block)(torch.randn(1, 2, 3, 4))
