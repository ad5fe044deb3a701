"""Calls of scaled_dot_product_attention go around the ring as they are made, or are refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atorch.runtime.context_parallel import Deal, RingExchange
from atorch.runtime.context_parallel import ring as exchanges
from atorch.runtime.sequence_parallel import AttentionCall, TokenPartition
from tests.pool import on_ranks

LENGTH = 16


def whole_call(**changes: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 2, 4, LENGTH, 8, generator=generator).unbind(0)
    return AttentionCall(query, key[:, :2], value[:, :2], enable_gqa=True)._replace(**changes)


def no_more(call: AttentionCall) -> Tensor:
    raise AssertionError("a ring leaves nothing to others")


def own(call: AttentionCall, share: TokenPartition) -> AttentionCall:
    parts = {name: share.part(getattr(call, name), -2) for name in ("query", "key", "value")}
    return call._replace(**parts)


@on_ranks()
def test_it_answers_as_the_operation_does(rank: int, size: int) -> None:
    for balanced in (False, True):  # the stream deals tokens out as the ring has them
        dealt = TokenPartition(dist.group.WORLD, balanced=balanced).part(torch.arange(24), 0)
        assert dealt.equal(Deal(size, balanced).tokens(rank, 24))
    share = TokenPartition(dist.group.WORLD, balanced=True)
    exchange = RingExchange(dist.group.WORLD, load_balance=True)
    flat = whole_call()._replace(enable_gqa=False)
    ways = [
        (whole_call(is_causal=True, scale=0.3), None),
        (whole_call(attn_mask=torch.ones(LENGTH, LENGTH).tril().bool()), None),
        (flat._replace(query=flat.query[0], key=flat.query[1], value=flat.query[0]), None),
        (whole_call(attn_mask=torch.zeros(LENGTH, LENGTH)), torch.bfloat16),
        (whole_call(), torch.bfloat16),
    ]
    found = []
    for call, autocast in ways:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            expected = scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
            got = exchange(own(call, share), no_more)
        rows = share.part(expected, -2)
        found.append((float((got - rows).norm() / rows.norm()), got.dtype == rows.dtype and got.shape == rows.shape))
    assert all(alike for _, alike in found)
    assert max(error for error, _ in found[:3]) <= 1e-5
    assert max(error for error, _ in found[3:]) <= 1e-2


@on_ranks()
def test_a_mask_that_all_blocks_share_is_looked_at_once(rank: int, size: int) -> None:
    exchange = RingExchange(dist.group.WORLD, load_balance=False)
    share = TokenPartition(dist.group.WORLD)
    count = 0
    theirs = exchanges.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return theirs(*args, **kwargs)

    mask = torch.ones(2, 1, LENGTH, LENGTH).tril().bool()
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "schedule", counting)
        for step in range(3):
            if step == 2:
                mask[..., :3] = False  # the next batch's, in the same memory
            for _ in range(4):
                exchange(own(whole_call(attn_mask=mask), share), no_more)
            counts.append(count)
    assert counts == [1, 1, 2]


@on_ranks()
def test_what_does_not_fit_is_said(rank: int, size: int) -> None:
    exchange = RingExchange(dist.group.WORLD, load_balance=True)
    learnt = torch.zeros(LENGTH, LENGTH, requires_grad=True)
    long = torch.randn(2, 2, 3 * LENGTH, 8)
    said = [
        exchange.unfit(call)
        for call in (
            whole_call(),
            whole_call(is_causal=True),
            whole_call(attn_mask=torch.zeros(1, 1, 1, LENGTH)),
            whole_call(attn_mask=learnt),
            whole_call(attn_mask=torch.zeros(LENGTH, 2)),
            whole_call(is_causal=True, key=long, value=long),
            whole_call(key=long[:, :, :6], value=long[:, :, :6]),
            whole_call(key=torch.randn(2, 3, LENGTH, 8)),
            whole_call(query=torch.randn(1, 2, 4, LENGTH, 8)),
        )
    ]
    assert said[:3] == [None] * 3
    wanted = ("gradient", "(16, 2)", "16 queries and 48 keys", "6 keys cannot be cut into 4", "shared out", "5 dims")
    assert all(words in str(reason) for words, reason in zip(wanted, said[3:], strict=True)), said
