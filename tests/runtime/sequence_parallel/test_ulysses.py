"""Attention over exchanged heads is attention to all tokens: with shared keys and values, masks, and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from atorch.runtime.sequence_parallel import AttentionCall, TokenPartition, Ulysses
from tests.pool import on_ranks
from tests.runtime.tensor_parallel.models import Collectives

HEADS, TOKENS, WIDTH = 4, 8, 6


def mask_of(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(2)
    if kind == "hidden":
        return torch.rand(2, 1, TOKENS, TOKENS, generator=generator) > 0.2
    return torch.randn(1, HEADS, TOKENS, TOKENS, generator=generator) if kind == "biases" else None


def attention(call: AttentionCall) -> Tensor:
    *six, scale, gqa = call
    return F.scaled_dot_product_attention(*six, scale=scale, enable_gqa=gqa)


def compared(rank: int, size: int, kv_heads: int, kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    heads = {"query": HEADS, "key": kv_heads, "value": kv_heads}
    whole = {name: torch.randn(2, count, TOKENS, WIDTH, generator=generator) for name, count in heads.items()}
    share = TokenPartition(dist.group.WORLD)
    own = {name: share.part(tensor, 2).clone().requires_grad_() for name, tensor in whole.items()}
    whole = {name: tensor.requires_grad_() for name, tensor in whole.items()}
    more = {"attn_mask": mask_of(kind), "is_causal": kind == "causal", "scale": 0.3, "enable_gqa": kv_heads < HEADS}
    expected = attention(AttentionCall(**whole, **more))
    with Collectives() as forward:
        got = Ulysses(dist.group.WORLD)(AttentionCall(**own, **more), attention)
    with Collectives() as backward:
        (got * share.part(expected.detach().sin(), 2)).sum().backward()
    (expected * expected.detach().sin()).sum().backward()
    error = max(float((own[name].grad - share.part(whole[name].grad, 2)).abs().max()) for name in own)
    return {
        "value": float((got - share.part(expected, 2)).abs().max()),
        "gradients": error,
        "counts": (forward.counts, backward.counts),
    }


KINDS = ((4, "plain"), (4, "hidden"), (2, "causal"), (2, "biases"), (1, "biases"))  # heads of keys, mask


@on_ranks()
def test_heads_are_shared_out_whole_and_every_rank_has_its_tokens_of_the_result(rank: int, size: int) -> None:
    unfit = [Ulysses(dist.group.WORLD).unfit(AttentionCall(*3 * [torch.empty(1, heads, 2, 2)])) for heads in (3, 4)]
    assert unfit == ["2 ranks do not divide its 3 heads; give the axis a size of 3", None]
    for kind, seen in zip(KINDS, [compared(rank, size, *kind) for kind in KINDS], strict=True):
        assert seen["value"] <= 1e-6, kind
        assert seen["gradients"] <= 1e-5, kind
        assert seen["counts"] == ({"alltoall_base_": 4}, {"alltoall_base_": 4}), kind
