"""Models whose blocks work on a part of the tokens train as whole ones do; what cannot is refused and says why."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import ArgumentError, AtorchError
from atorch.runtime.memory.recompute import checkpoint_wrapper
from tests.pool import Pool, on_ranks
from tests.runtime.sequence_parallel.training import TOKENS, Stack, average, batch, made, parity, ulysses
from tests.runtime.tensor_parallel.models import side_by_side

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
    ("written out", {}, ["StrategyError", "blocks.0", "attn_implementation='sdpa'", "module_replace"]),
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
    torch.manual_seed(5)
    output = model(same)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    again = model(same)
    states = [torch.empty_like(state) for _ in range(size)]
    dist.all_gather(states, state)
    assert not torch.allclose(output[:, :4], output[:, 4:])
    assert torch.equal(output, again)
    assert all(torch.equal(other, state) for other in states)
