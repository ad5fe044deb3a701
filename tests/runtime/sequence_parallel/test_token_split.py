"""Models whose blocks work on a part of the tokens train as whole ones do, by exchanged heads; or are refused."""

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.distributed.collectives import gather_objects
from atorch.errors import ArgumentError, AtorchError
from atorch.runtime.memory.recompute import checkpoint_wrapper
from atorch.runtime.sequence_parallel import AttentionCall, TokenPartition, Ulysses
from atorch.runtime.sequence_parallel.attention import Attend, Chain, exchange_attention
from tests.pool import Pool, on_ranks
from tests.runtime.sequence_parallel.training import TOKENS, Stack, average, batch, made, parity, ulysses
from tests.runtime.tensor_parallel.models import Collectives, side_by_side


def check_round_trip(rank: int, size: int, balanced: bool, averaged: bool) -> None:
    """A weight outside and one inside of what is split, against the same computed whole."""
    share = TokenPartition(dist.group.WORLD, balanced=balanced, averaged=averaged)
    x = torch.arange(2 * 8 * 3, dtype=torch.float64).reshape(2, 8, 3).sin()
    outer, inner = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.5, 0.5))
    plain_outer, plain_inner = (each.detach().clone().requires_grad_() for each in (outer, inner))
    own = share.scatter(x * outer, 1)
    whole = share.gather((own * inner).tanh(), 1)
    expected = (x * plain_outer * plain_inner).tanh()
    for each in (whole, expected):
        (each * x.cos()).sum().backward()
    for each in (outer, inner):
        dist.all_reduce(each.grad)
        each.grad /= size
    assert own.shape[1] == 8 // size
    assert torch.equal(own, share.part(x * outer, 1))
    assert torch.allclose(whole, expected)
    assert torch.allclose(outer.grad, plain_outer.grad)
    assert torch.allclose(inner.grad * (1 if averaged else size), plain_inner.grad)


@on_ranks()
def test_pieces_are_in_order_or_from_front_and_back_and_one_average_is_right(rank: int, size: int) -> None:
    for balanced, averaged in product([True, False], repeat=2):
        check_round_trip(rank, size, balanced, averaged)
    tokens = torch.arange(8)
    shares = TokenPartition(dist.group.WORLD), copy.deepcopy(TokenPartition(dist.group.WORLD, balanced=True))
    with pytest.raises(ArgumentError, match="4 equal pieces, but were given with 6 tokens"):
        shares[1].part(tokens[:6], 0)
    assert [share.part(tokens, 0).tolist() for share in shares] == [
        [[0, 1, 2, 3], [0, 1, 6, 7]],
        [[4, 5, 6, 7], [2, 3, 4, 5]],
    ][rank]


class Projecting(nn.Module):
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
    block, notes = Projecting(), []
    x = torch.randn(1, 2, 3, 4)
    before = block(x)
    exchange_attention(block, partial(noting, notes, "first"))
    exchange_attention(block, partial(noting, notes, "second"))
    torch.testing.assert_close(block(x), before + 2)
    assert notes == [("second", True), ("first", True)]
    F.scaled_dot_product_attention(x, x, x)
    assert len(notes) == 2


def test_recomputations_and_copies_do_it_too() -> None:
    block, notes = Projecting(), []
    with Chain(partial(noting, notes, "watch")):
        block(torch.randn(1, 2, 3, 4))
    assert len(notes) == 1
    exchange_attention(block, partial(noting, notes, "one"))
    checkpoint_wrapper(block)
    block(torch.randn(1, 2, 3, 4, requires_grad=True)).sum().backward()
    assert len(notes) == 3
    copy.deepcopy(block)(torch.randn(1, 2, 3, 4))


HEADS, LENGTH, WIDTH = 4, 8, 6


def mask_of(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(2)
    if kind == "hidden":
        return torch.rand(2, 1, LENGTH, LENGTH, generator=generator) > 0.2
    return torch.randn(1, HEADS, LENGTH, LENGTH, generator=generator) if kind == "biases" else None


def attend_to(call: AttentionCall) -> Tensor:
    *six, scale, gqa = call
    return F.scaled_dot_product_attention(*six, scale=scale, enable_gqa=gqa)


def compared(rank: int, size: int, kv_heads: int, kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    heads = {"query": HEADS, "key": kv_heads, "value": kv_heads}
    whole = {name: torch.randn(2, count, LENGTH, WIDTH, generator=generator) for name, count in heads.items()}
    share = TokenPartition(dist.group.WORLD)
    own = {name: share.part(tensor, 2).clone().requires_grad_() for name, tensor in whole.items()}
    whole = {name: tensor.requires_grad_() for name, tensor in whole.items()}
    more = {"attn_mask": mask_of(kind), "is_causal": kind == "causal", "scale": 0.3, "enable_gqa": kv_heads < HEADS}
    expected = attend_to(AttentionCall(**whole, **more))
    with Collectives() as forward:
        got = Ulysses(dist.group.WORLD)(AttentionCall(**own, **more), attend_to)
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


BLOCKS = 2
FORWARD = {"alltoall_base_": 4 * BLOCKS, "allgather_": 1}
"""Queries, keys, values and results of each block, and the results gathered for a loss that asks for all of them."""
BY_TOKEN, CUT = {"alltoall_base_": 4 * BLOCKS}, FORWARD
"""In backward, where embeddings are of a rank's own tokens; where their results are cut, gradients are gathered."""


OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt2", "mixtral", "qwen3", "phi3")]


@pytest.mark.parametrize("name", ["llama", "bert", "vit", *OTHERS])
def test_trains_as_the_whole_model(pool: Pool, name: str) -> None:
    for seen in pool.run(parity, name, {}):
        assert seen["training"]
        assert seen["loss"] <= 1e-5
        assert seen["update"] <= 1e-4
        assert (seen["forward"], seen["backward"]) == (FORWARD, CUT if name in ("bert", "vit") else BY_TOKEN)
        assert seen["tokens"] == [5 if name == "vit" else TOKENS // 2]
        if name == "llama":  # tables of positions are cut, and the stream is not gathered in between
            first, last = seen["streams"].values()
            assert first[0]["[0][0]"] == 1
            assert "[0][0]" not in last[0]
            assert last[0]["[1]['position_embeddings'][0]"] == 1
            assert (first[1], last[1]) == ({}, {"": 1})


def test_ranks_may_outnumber_the_heads_of_keys(pool: Pool) -> None:
    for seen in pool.run(parity, "llama", {"kv_heads": 1}, ranks=4):
        assert seen["loss"] <= 1e-5
        assert seen["update"] <= 1e-4


def prepare(model: Any, how: str) -> None:
    for block in model.model.layers:
        if how == "recomputed":
            checkpoint_wrapper(block)
        else:
            block.compile(backend="aot_eager")


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_blocks_are_recomputed_with_their_exchanges_or_compiled(pool: Pool, how: str) -> None:
    for seen in pool.run(parity, "llama", {}, partial(prepare, how=how)):
        assert seen["loss"] <= 1e-5
        assert seen["update"] <= 1e-4
        if how == "recomputed":
            again = {"alltoall_base_": 2 * FORWARD["alltoall_base_"]}
            assert (seen["forward"], seen["backward"]) == (FORWARD, again)


def inputs(tokens: int = 8) -> Tensor:
    return torch.randn(3, tokens, 8, generator=torch.Generator().manual_seed(4))


def structure(model: nn.Module) -> list[Any]:
    return [(type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("vit", {"image": 16}, ["StrategyError", "vit.layers.0", "17 tokens", "multiple of 2"]),
    ("llama", {"heads": 3, "kv_heads": 3}, ["StrategyError", "model.layers.0", "3 heads", "size of 3"]),
    ("t5", {}, ["StrategyError", "encoder.block.0", "bias of relative positions"]),
    ("convolution", {}, ["StrategyError", "blocks.0", "mix", "token by token"]),
    ("inner outputs", {}, ["AtorchError", "other outputs", "[1]"]),
]


def call(name: str, model: nn.Module) -> Any:
    return model(**batch(name, image=16))


@on_ranks()
def test_what_cannot_be_split_is_named(rank: int, size: int) -> None:
    messages = []
    for name, settings, _ in REFUSED:
        torch.manual_seed(0)
        model = made(name, **settings) if name in ("vit", "t5", "llama") else Stack(name)
        run: Any = (lambda m: m(inputs())) if isinstance(model, Stack) else partial(call, name)
        before = structure(model)
        with pytest.raises(AtorchError) as caught:
            ulysses(model, run, dist.group.WORLD)
        assert type(caught.value) is AtorchError or structure(model) == before
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    for message, (_, _, signs) in zip(messages, REFUSED, strict=True):
        assert all(sign in message for sign in signs), message


@on_ranks()
def test_blocks_are_used_twice_with_other_lengths_and_dropout_of_their_own(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = Stack("twice")
    plain = copy.deepcopy(model)
    ulysses(model, lambda model: model(inputs()), dist.group.WORLD)
    with pytest.raises(ArgumentError, match="with 7 tokens; pad them to a multiple of 2"):
        model(inputs(7))
    found = side_by_side(model, plain, lambda model, _: model(inputs(16)).square().mean(), reduce=average)
    assert max(found.values()) <= 1e-5
    torch.manual_seed(0)
    model = Stack("dropout")
    ulysses(model, lambda model: model(inputs()), dist.group.WORLD)
    same = inputs()[:, :1].expand(3, 8, 8)  # all tokens alike, so that only dropout tells them apart
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        output = model(same)
        seen.append((output.tolist(), torch.get_rng_state().tolist()))
    assert not torch.allclose(output[:, :4], output[:, 4:])
    assert seen[0] == seen[1]
    assert gather_objects(seen[0][1]) == [seen[0][1]] * size
