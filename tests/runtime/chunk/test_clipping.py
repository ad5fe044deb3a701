"""The norm of gradients in chunks is that of the model's gradients, and clipping scales what the chunks keep."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.auto.opt_lib.chunk.trace import foreseen
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.gradients.clip import clip_grad_norm
from tests.pool import on_ranks
from tests.runtime.sharing import SEQ, VOCAB, make

ROWS = 4


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def clipped(max_norm: float, norm_type: float, rank: int = 0, size: int = 1) -> tuple[float, float, float]:
    """The norm in chunks and without, and how far clipped gradients are apart at most."""
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(5))
    plain, model = make("awkward"), make("awkward")
    mine = tokens.chunk(size)[rank]
    passed = foreseen(model, mine, loss, device_type="cpu")
    group = dist.group.WORLD if size > 1 else None
    operations = chunk(model, passed, 10**9, device=torch.device("cpu"), group=group)
    loss(plain, tokens).backward()
    loss(model, mine).backward()
    norm, expected = (float(clip_grad_norm(each, max_norm, norm_type)) for each in (model, plain))
    apart = 0.0
    theirs = dict(plain.named_parameters())
    for memory in operations.chunks.chunks:
        for slot in memory.spec.slots:
            kept, whole = memory.gradient_of(slot), theirs[slot.name].grad
            if kept is not None:
                assert whole is not None
                part = whole.flatten()[memory.within(slot)]
                apart = max(apart, float((kept.flatten() - part).abs().max()))
            else:
                assert whole is None or memory.part(memory.master, slot) is None
    return norm, expected, apart


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 1e-2), (math.inf, 1e9), (1.0, 1e-2)])
def test_same_bits_as_without_chunks(norm_type: float, max_norm: float) -> None:
    norm, expected, apart = clipped(max_norm, norm_type)
    assert norm == expected
    assert norm > 2e-2
    assert apart == 0


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks()
def test_shares_have_the_norm_of_the_whole(rank: int, size: int, norm_type: float) -> None:
    norm, expected, apart = clipped(1e-2, norm_type, rank, size)
    assert norm == pytest.approx(expected, rel=1e-5)
    assert apart <= 1e-6
