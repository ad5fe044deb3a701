"""Sharding: plain training's updates, each rank's share of the bytes, and what is gathered together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from atorch.errors import ArgumentError
from atorch.runtime.fsdp.groups import FsdpUnit, arrange, by_block, by_size, without_trainable
from atorch.runtime.fsdp.shard import _make_contiguous, shard
from atorch.runtime.precision.fp8 import convert_linears
from tests.auto.training import assert_trains_like_plain
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
    ignored = list(model.get_submodule(options["ignored"]).parameters()) if "ignored" in options else []
    shard(model, mesh, GROUPINGS[grouping](model), **{**options, "ignored": ignored})
    train(model, sgd(param_groups(model)), rank, size, accumulate)
    assert not any(isinstance(each, DTensor) for each in ignored)
    return deviation(model, name, accumulate)


Case = tuple[str, str, dict[str, Any], int]
CASES: dict[int, list[Case]] = {
    1: [("awkward", "blocks", {}, 1)],
    2: [
        ("awkward", "blocks", {}, 2),
        ("awkward", "blocks", {"ignored": "mixer"}, 2),
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


@pytest.mark.parametrize("ranks", CASES)
def test_trains_as_one_process_does(pool: Pool, ranks: int) -> None:
    assert_trains_like_plain(pool, trained, CASES[ranks], ranks)


@on_ranks()
def test_each_rank_holds_its_share_and_its_own_without_synchronising(rank: int, size: int) -> None:
    model = make("llama")
    whole = sum(p.numel() for p in model.parameters())
    shard(model, flat(size), blocks(model))
    optim = sgd(param_groups(model))
    train(model, optim, rank, size)
    held = torch.tensor([
        sum(p.to_local().numel() for p in model.parameters()),
        sum(s["momentum_buffer"].to_local().numel() for s in optim.state.values()),
    ])  # fmt: skip
    assert abs(int(held[0]) - whole / 2) <= 0.02 * whole
    dist.all_reduce(held)
    assert held.tolist() == [whole, whole]
    model = make("awkward", seed=rank)
    shard(model, flat(size), blocks(model), sync_module_states=False)
    expected = make("awkward", seed=rank).mixer.weight
    assert torch.equal(model.mixer.weight.to_local(), expected.chunk(size)[rank])


@on_ranks(1)
def test_whole_groups_wait_on_the_host_blocks_first(rank: int, size: int) -> None:
    for share, least in ((0.0, 0.0), (0.5, 0.2), (1.0, 1.0)):
        model = make("llama")
        whole = sum(p.numel() for p in model.parameters())
        on_host = set(map(id, shard(model, flat(size), blocks(model), offload=share)))
        sizes = {name: p.numel() for name, p in model.named_parameters() if id(p) in on_host}
        assert least <= sum(sizes.values()) / whole <= share
        assert (share == 0) == (not any(name.endswith("layers.0.mlp.up_proj.weight") for name in sizes))


@on_ranks()
def test_low_precision_is_gathered_and_fp32_and_batch_norms_are_kept(rank: int, size: int) -> None:
    model = make("llama")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, flat(size), blocks(model), mp_policy=policy)
    seen = []
    model.llama.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(str(args[0].dtype)))
    train(model, sgd(param_groups(model)), rank, size)
    assert (seen[0], str(next(model.parameters()).dtype)) == ("torch.bfloat16", "torch.float32")
    assert deviation(model, "llama") <= 3e-2
    for autocast in (False, True):
        block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
        model = nn.Sequential(block, nn.Flatten(), nn.Linear(8, 1))
        shard(model, flat(size), [FsdpUnit((block,))], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(torch.randn(4, 2, 2, 2)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        block.unshard()  # type: ignore[operator]
        block[1].unshard()  # type: ignore[operator]
        assert (block[0].weight.dtype, block[1].weight.dtype) == (torch.bfloat16, torch.float32)


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


def test_units_are_grouped_by_what_they_share() -> None:
    """A tied embedding and head are one group; so are blocks that share a weight; Bert's head joins with its parent."""
    llama, awkward, bert = (names_of(model, blocks(model)) for model in map(make, ("llama", "awkward", "bert")))
    assert (["llama.model.embed_tokens", "llama.lm_head"], True) in llama
    assert [group for group, _ in llama if "layers" in group[0]] == [[f"llama.model.layers.{i}"] for i in range(2)]
    for group in (["blocks.0", "blocks.2"], ["blocks.1"], ["tokens", "places"]):
        assert group in [each for each, _ in awkward]
    assert not any("bert.cls.predictions.decoder" in group for group, _ in bert)
    assert ["bert.cls.predictions.transform.dense"] in [group for group, _ in bert]


def test_a_tied_parameter_of_the_root_and_untied_embeddings_have_groups() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": Awkward().blocks, "small": nn.Linear(4, 4)})
    model["head"] = nn.Linear(4, 8)
    found = names_of(model, by_block(model))
    assert (["embed"], True) in found
    assert (["head"], True) in found
    assert not any("small" in group for group, _ in found)
    model = Awkward()
    model.tied = model.blocks[1].up.weight
    assert ["blocks.1"] not in [group for group, _ in names_of(model, blocks(model))]


def test_by_size_takes_the_smallest_modules_that_are_large_enough() -> None:
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


def test_weights_that_lose_their_memory_format_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    _make_contiguous(model.named_parameters())
    assert "such as 0.weight, lose their memory format" in caplog.text


@on_ranks()
def test_weights_of_another_memory_format_are_sharded(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    shard(model, flat(size), [])
    assert model(torch.ones(1, 4, 3, 3)).isfinite().all()


class Tied(nn.Module):
    """A layer between an embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens)))


@on_ranks()
def test_weights_of_fp8_layers_alone_are_gathered_in_8_bits_and_between_passes_they_are_shards(
    rank: int, size: int
) -> None:
    pytest.importorskip("torchao")
    model = Tied()
    convert_linears(model, emulate=True, fsdp_float8_all_gather=True)
    shard(model, flat(size), [FsdpUnit((model.inner,))], reshard_after_forward=False)
    optim, kinds = sgd(param_groups(model)), []
    for layer in (model.inner, model.head):
        layer.register_forward_hook(lambda module, args, output: kinds.append(type(module.weight).__name__))
    loss = model(torch.arange(16)).sum()
    assert kinds == ["Float8TrainingTensor", "Parameter"]
    assert isinstance(model.inner.weight, DTensor)
    assert float(model.inner.weight.norm()) > 0
    loss.backward()
    optim.step()
    model.inner.unshard()
    model.inner.reshard()
    optim.step()
    with pytest.raises(ArgumentError, match="Call the model"):
        model.inner(torch.randn(16, 32))
