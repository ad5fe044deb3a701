"""Sharding: plain training's updates, each rank's share of the bytes, and what is gathered together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from atorch.errors import ArgumentError
from atorch.runtime.fsdp.groups import FsdpUnit, arrange, by_block, without_trainable
from atorch.runtime.fsdp.shard import _make_contiguous, shard
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import Awkward, deviation, make, param_groups, sgd, train, whole


def flat(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("data",))


def blocks(model: nn.Module) -> list[FsdpUnit]:
    return arrange(model, by_block(model))


def root_alone(model: nn.Module) -> list[FsdpUnit]:
    return []


def outmost(model: nn.Module) -> list[FsdpUnit]:
    return arrange(model, without_trainable(by_block(model)))


GROUPINGS: dict[str, Callable[[nn.Module], list[FsdpUnit]]] = {
    "blocks": blocks,
    "root alone": root_alone,
    "outmost": outmost,
}


def trained(rank: int, size: int, name: str, grouping: str, options: dict[str, Any], accumulate: int) -> float:
    mesh = flat(size)
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "zero"))
    model = make(name, seed=rank)  # rank 0's weights count
    shard(model, mesh, GROUPINGS[grouping](model), **options)
    train(model, sgd(param_groups(model)), rank, size, accumulate)
    return deviation(model, name, accumulate)


Case = tuple[str, str, dict[str, Any], int]
CASES: dict[int, list[Case]] = {
    1: [("awkward", "blocks", {}, 1)],
    2: [
        ("awkward", "blocks", {}, 2),
        ("llama", "blocks", {"reshard_after_forward": False}, 1),
        ("awkward", "blocks", {"forward_prefetch": True}, 1),
        ("llama", "blocks", {"offload": True}, 1),
        ("awkward", "blocks", {"offload": 0.5}, 2),
        ("awkward", "root alone", {}, 1),
        ("llama", "outmost", {}, 1),
        ("bert", "blocks", {}, 1),  # whose head shares with an embedding, and with its parent
    ],
    4: [("awkward", "blocks", {}, 1)],  # replicas of shards
}


def trained_cases(rank: int, size: int) -> list[float]:
    return [trained(rank, size, *case) for case in CASES[size]]


@pytest.mark.parametrize("ranks", CASES)
def test_trains_as_one_process_does(pool: Pool, ranks: int) -> None:
    for off in pool.run(trained_cases, ranks=ranks):
        assert max(off) <= 1e-4, off


@on_ranks()
def test_ignored_parameters_stay_whole_and_are_averaged(rank: int, size: int) -> None:
    model = make("awkward", seed=rank)
    shard(model, flat(size), blocks(model), ignored=model.mixer.parameters())
    train(model, sgd(param_groups(model)), rank, size, accumulate=2)
    assert deviation(model, "awkward", accumulate=2) <= 1e-4
    assert not isinstance(model.mixer.weight, DTensor)


def held(rank: int, size: int) -> tuple[int, int, int]:
    model = make("llama")
    total = sum(p.numel() for p in model.parameters())
    shard(model, flat(size), blocks(model))
    optim = sgd(param_groups(model))
    train(model, optim, rank, size)
    parameters = [p.to_local().numel() for p in model.parameters()]
    states = [s["momentum_buffer"].to_local().numel() for s in optim.state.values()]
    return total, sum(parameters), sum(states)


def test_each_rank_holds_its_share_of_parameters_and_states(pool: Pool) -> None:
    shares = pool.run(held)
    total = shares[0][0]
    assert sum(parameters for _, parameters, _ in shares) == total
    assert sum(states for _, _, states in shares) == total
    assert all(abs(parameters - total / 2) <= 0.02 * total for _, parameters, _ in shares)


def waiting(rank: int, size: int) -> list[tuple[list[str], float]]:
    found = []
    for share in (0.0, 0.5, 1.0):
        model = make("llama")
        total = sum(p.numel() for p in model.parameters())
        on_host = set(map(id, shard(model, flat(size), blocks(model), offload=share)))
        sizes = {name: p.numel() for name, p in model.named_parameters() if id(p) in on_host}
        found.append((list(sizes), sum(sizes.values()) / total))
    return found


def test_whole_groups_wait_on_the_host_blocks_first(pool: Pool) -> None:
    ((none, (names, half), (_, every)),) = pool.run(waiting, ranks=1)
    assert none == ([], 0.0)
    assert 0.2 < half <= 0.5
    assert any(name.endswith("layers.0.mlp.up_proj.weight") for name in names)
    assert every == 1.0


@on_ranks()
def test_without_synchronising_each_rank_gives_its_own_shard(rank: int, size: int) -> None:
    model = make("awkward", seed=rank)
    shard(model, flat(size), blocks(model), sync_module_states=False)
    expected = make("awkward", seed=rank).mixer.weight
    assert torch.equal(model.mixer.weight.to_local(), expected.chunk(size)[rank])


@on_ranks()
def test_a_step_after_an_evaluation_is_seen(rank: int, size: int) -> None:
    model = make("awkward")
    shard(model, flat(size), blocks(model), reshard_after_forward=False)
    tokens = torch.arange(6).expand(2, 6)
    model(tokens).sum().backward()
    with torch.no_grad():
        before = model(tokens)
    is_sharded = all(isinstance(p, DTensor) for p in model.parameters() if p.dim())
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.1)
    assert is_sharded
    assert not torch.equal(before, model(tokens))


@on_ranks()
def test_low_precision_is_gathered_and_fp32_kept(rank: int, size: int) -> None:
    model = make("llama")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, flat(size), blocks(model), mp_policy=policy)
    seen = []
    model.llama.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(str(args[0].dtype)))
    train(model, sgd(param_groups(model)), rank, size)
    assert (seen[0], str(next(model.parameters()).dtype)) == ("torch.bfloat16", "torch.float32")
    assert deviation(model, "llama") <= 3e-2


class Fillable(nn.Module):
    """Parameters that only a function can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))


@on_ranks()
def test_meta_modules_are_filled_once_sharded(rank: int, size: int) -> None:
    with torch.device("meta"):
        reset, filled, empty = nn.Linear(4, 4), Fillable(), Fillable()
    shard(reset, flat(size), [])
    shard(filled, flat(size), [], param_init_fn=lambda module: nn.init.ones_(module.weight))
    with pytest.raises(ArgumentError) as caught:
        shard(empty, flat(size), [])
    assert whole(reset.weight).std().item() > 0
    assert (whole(filled.weight) == 1).all()
    assert "param_init_fn" in str(caught.value)


def names_of(model: nn.Module, groups: list[FsdpUnit]) -> list[tuple[list[str], bool]]:
    names = {module: name for name, module in model.named_modules()}
    return [([names[module] for module in group.modules], group.keep) for group in groups]


def test_tied_embedding_and_head_are_one_group() -> None:
    model = make("llama")
    found = names_of(model, blocks(model))
    assert (["llama.model.embed_tokens", "llama.lm_head"], True) in found
    assert [group for group, _ in found if "layers" in group[0]] == [[f"llama.model.layers.{i}"] for i in range(2)]


def test_untied_embedding_and_head_have_groups_of_their_own() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": Awkward().blocks, "small": nn.Linear(4, 4)})
    model["head"] = nn.Linear(4, 8)
    found = names_of(model, by_block(model))
    assert (["embed"], True) in found
    assert (["head"], True) in found
    assert not any("small" in group for group, _ in found)


def test_units_that_share_a_parameter_are_one_group() -> None:
    model = Awkward()
    groups = [group for group, _ in names_of(model, blocks(model))]
    assert ["blocks.0", "blocks.2"] in groups
    assert ["blocks.1"] in groups
    assert ["tokens", "places"] in groups


def test_what_shares_a_parameter_with_one_that_joined_joins_too() -> None:
    model = make("bert")
    groups = [group for group, _ in names_of(model, blocks(model))]
    assert not any("bert.cls.predictions.decoder" in group for group in groups)  # its parent holds another group
    assert ["bert.cls.predictions.transform.dense"] in groups


def test_a_parameter_of_the_root_leaves_its_unit_to_the_root() -> None:
    model = Awkward()
    model.tied = model.blocks[1].up.weight
    assert ["blocks.1"] not in [group for group, _ in names_of(model, blocks(model))]


def test_by_size_takes_the_smallest_modules_that_are_large_enough() -> None:
    from atorch.runtime.fsdp.groups import by_size

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(8, 8), nn.Linear(2, 2))
    names = {module: name for name, module in model.named_modules()}
    assert [names[module] for module in by_size(model, 40)] == ["0", "1"]
    assert [names[module] for module in by_size(model, 20)] == ["0.0", "0.1", "1"]


def test_what_trains_goes_to_the_root_and_what_is_frozen_stays() -> None:
    model = Awkward().requires_grad_(False)
    model.blocks[0].down.requires_grad_(True)
    model.blocks[1].up.bias.requires_grad_(True)  # beside a frozen weight: stays with its block
    groups = without_trainable([FsdpUnit((block,)) for block in model.blocks])
    assert [group for group, _ in names_of(model, groups)] == [
        ["blocks.0.norm", "blocks.0.up"],
        ["blocks.1.norm", "blocks.1.up", "blocks.1.down"],
        ["blocks.2"],
    ]


def normalized_in_bf16(rank: int, size: int, autocast: bool) -> tuple[torch.dtype, torch.dtype, bool]:
    block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(8, 1))
    shard(model, flat(size), [FsdpUnit((block,))], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randn(4, 2, 2, 2)).sum().backward()
    has_gradients = all(parameter.grad is not None for parameter in model.parameters())
    block.unshard()  # type: ignore[operator]
    block[1].unshard()  # type: ignore[operator]
    conv, norm = block[0].weight, block[1].weight
    return norm.dtype, conv.dtype, has_gradients  # type: ignore[union-attr, return-value]


def test_batch_norms_stay_in_fp32(pool: Pool) -> None:
    for autocast in (False, True):
        assert pool.run(normalized_in_bf16, autocast) == [(torch.float32, torch.bfloat16, True)] * 2


@on_ranks()
def test_hooks_on_gradients_that_would_not_be_called_are_refused(rank: int, size: int) -> None:
    said = []
    for when in ("before", "after"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        try:
            if when == "before":
                model[1].weight.register_hook(lambda gradient: gradient * 0.5)
            shard(model, flat(size), [])
            model[1].weight.register_hook(lambda gradient: gradient * 0.5)
            model(torch.randn(2, 3))
        except ArgumentError as error:
            said.append(f"{when}: {error}")
    assert [each.partition(" has a hook")[0] for each in said] == ["before: 1.weight", "after: 1.weight"]


def channels_last(rank: int, size: int) -> bool:
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    shard(model, flat(size), [])
    return bool(model(torch.ones(1, 4, 3, 3)).isfinite().all())


def test_weights_that_lose_their_memory_format_are_told(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    assert all(pool.run(channels_last))
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    _make_contiguous(model.named_parameters())
    assert "such as 0.weight, lose their memory format" in caplog.text


def looked_at(rank: int, size: int, reshard: bool | None) -> list[float]:
    """What forward gives before and after a step, in passes with gradients that no backward follows."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []
    if size > 1:
        shard(model, flat(size), [], reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        seen.append(float(model(torch.ones(2, 4)).detach().sum()))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(model(torch.ones(2, 4)).detach().sum()))
    return seen


def test_a_pass_without_backward_leaves_nothing_stale(pool: Pool) -> None:
    alone = looked_at(0, 1, None)
    for reshard in (None, False):
        assert pool.run(looked_at, reshard) == [pytest.approx(alone, rel=1e-5)] * 2
