"""Sharded optimizers step as whole ones do, hold their share of the state, and save what any rank count can load."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from atorch.compat.engines import shard_gradients, shard_states
from atorch.errors import ArgumentError, CheckpointError
from atorch.model.user_functions import ELEMENTWISE
from atorch.runtime.data_parallel import buckets
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.data_parallel.replicate import replicate
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer, deal_out
from atorch.runtime.precision.master_weights import to_half, with_master_weights
from tests.auto.training import assert_trains_like_plain
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import clear, deviation, make, param_groups, replace, sgd, train, world

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_shares_are_within_the_largest_item_of_each_other(sizes: list[int], num_ranks: int) -> None:
    owners = deal_out(sizes, num_ranks)
    loads = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert len(owners) == len(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


def by_fairscale(rank: int, size: int, name: str, shares_gradients: bool) -> float:
    model: nn.Module = make(name, seed=0)
    groups = param_groups(model)
    optim = shard_states(groups, sgd, world())
    model = shard_gradients(model, optim, world()) if shares_gradients else replicate(model, world(), CPU)
    train(model, optim, rank, size, accumulate=2)
    return deviation(model, name, accumulate=2)


def put(optim: torch.optim.Optimizer) -> None:
    for param, state in optim.state.items():
        if state:
            optim.state[param] = {"momentum_buffer": torch.zeros_like(state["momentum_buffer"])}


@on_ranks()
def test_states_that_are_taken_away_are_gone(rank: int, size: int) -> None:
    found = []
    for wipe in (clear, replace, put):
        weights = []
        for optimizer in (sgd, lambda groups: ShardedOptimizer(groups, sgd, world())):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
            optim = optimizer(list(model.parameters()))
            for step in range(4):
                if step == 2:
                    wipe(optim)
                for param in model.parameters():
                    param.grad = torch.full_like(param, 1.0 + step)
                optim.step()
            weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
        found.append(float((weights[0] - weights[1]).abs().max()))
    assert max(found) == 0.0


def test_fairscale_trains_as_one_process_does(pool: Pool) -> None:
    assert_trains_like_plain(pool, by_fairscale, [("llama", False), ("awkward", True)])


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def stepped(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optim.step()
    optim.zero_grad()


@on_ranks()
def test_another_ranks_share_is_refused(rank: int, size: int) -> None:
    optim = ShardedOptimizer(make("awkward").parameters(), adam, world())
    shares: list[Any] = [None] * size
    dist.all_gather_object(shares, optim.local_state_dict())
    optim.load_state_dict(shares[rank])
    with pytest.raises(CheckpointError, match="Load the whole state"):
        optim.load_state_dict(shares[1 - rank])


@on_ranks()
def test_fp32_masters_exist_for_the_own_share_alone(rank: int, size: int) -> None:
    model, plain = make("llama"), make("llama")
    values, plain_values = to_half([model], torch.bfloat16), to_half([plain], torch.bfloat16)
    optim = ShardedOptimizer(model.parameters(), with_master_weights(adam, values=values), world())
    reference = with_master_weights(adam, values=plain_values)(plain.parameters())
    for seed in range(3):
        stepped(model, optim, seed)
        stepped(plain, reference, seed)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    full = optim.full_state_dict()
    assert full is None or sorted(full["state"][0]) == ["exp_avg", "exp_avg_sq", "master", "step"]
    assert (full is None) == (rank > 0)
    held = torch.tensor(sum(entry["master"].numel() for entry in optim.local_state_dict()["state"].values()))
    dist.all_reduce(held)
    assert held == sum(p.numel() for p in plain.parameters())
    half, wide = make("llama"), make("llama")
    to_half([half], torch.bfloat16)
    ShardedOptimizer(half.parameters(), with_master_weights(adam), world()).load_state_dict(reference.state_dict())
    assert all(map(torch.equal, half.parameters(), plain.parameters()))
    fresh = ShardedOptimizer(wide.parameters(), adam, world())
    fresh.load_state_dict(reference.state_dict())
    assert all(map(torch.equal, wide.parameters(), reference.shadows.values()))
    with pytest.raises(CheckpointError, match="this rank's share of a job's fp32 masters"):
        fresh.load_state_dict(optim.local_state_dict())


@on_ranks()
def test_a_rank_may_have_nothing_to_step_and_names_stay(rank: int, size: int) -> None:
    full = ShardedOptimizer(nn.Linear(2, 2).named_parameters(), adam, world()).full_state_dict()
    assert full is None if rank else full["param_groups"][0]["param_names"] == ["weight", "bias"]
    weight = nn.Parameter(torch.ones(2))
    optim = ShardedOptimizer([weight], sgd, world())
    weight.grad = torch.ones(2)
    optim.step()
    with pytest.raises(ArgumentError) as caught:
        optim.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert weight[0].item() == pytest.approx(0.95)
    assert "optim_param_func" in str(caught.value)


@on_ranks()
def test_broadcast_in_buckets(rank: int, size: int) -> None:
    """Tensors of several dtypes and layouts, in buckets of a few of them."""
    like = [torch.ones(3), torch.ones(5, dtype=torch.bfloat16), torch.ones(2, 4).t()]
    like += [torch.ones(0), torch.ones(100), torch.ones(())]
    mine, theirs = ([tensor * (rank + 1) for tensor in like] for _ in range(2))
    with mock.patch.object(buckets, "BUCKET_BYTES", 40):
        broadcast([(0, mine), (size - 1, theirs)], world())
    assert all((a == 1).all() and (b == size).all() for a, b in zip(mine, theirs, strict=True))


@on_ranks()
def test_what_is_unfrozen_is_sent_and_gradients_can_be_zeroed(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    model[1].requires_grad_(False)
    replicas = replicate(model, world(), CPU)
    optim = ShardedOptimizer(list(model.parameters()), adam, world())
    x = torch.randn(4, 3)[rank::size]
    for step in range(4):
        model[1].requires_grad_(step > 1)
        replicas(x).square().mean().backward()
        optim.step()
        optim.zero_grad(set_to_none=False)
    kept = all(p.grad is not None and not p.grad.any() for p in model.parameters())
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    assert (float((mine - first).abs().max()), kept) == (0.0, True)


class Various(nn.Module):
    """Parameters that are large, small, without dims, transposed, frozen, and never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(40, 7))
        self.wide = nn.Parameter(torch.randn(30, 50).t())
        self.bias, self.scale = nn.Parameter(torch.randn(50)), nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(100), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(90))
        self.wider = nn.Parameter(torch.randn(70, dtype=torch.float64))

    def groups(self) -> list[dict[str, Any]]:
        first = [self.table, self.bias, self.frozen, self.wider]
        return [{"params": first}, {"params": [self.wide, self.scale, self.unused], "lr": 0.03}]

    def draw_gradients(self, seed: int, sparse: bool) -> None:
        torch.manual_seed(seed)
        for param in (self.table, self.wide, self.bias, self.scale, self.wider):
            param.grad = torch.randn_like(param, memory_format=torch.contiguous_format)
        if sparse:
            rows = torch.tensor([[3, 0, 3, 21, 20]])
            self.table.grad = torch.sparse_coo_tensor(rows, torch.randn(5, 7), (40, 7), check_invariants=True)


MAKERS: dict[str, Any] = {kind.__name__: kind for kind in ELEMENTWISE}
MAKERS |= {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "foreach": lambda groups: torch.optim.Adam(groups, foreach=True, amsgrad=True, weight_decay=0.1),
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True, weight_decay=0.1),
    "sparse": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "sparse momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}


def same(expected: Any, got: Any, rounding: float) -> bool:
    """True if nested values have the same numbers, and tensors of the same kinds, at the same places."""
    flat = [{keystr(path): leaf for path, leaf in tree_flatten_with_path(each)[0]} for each in (expected, got)]
    return flat[0].keys() == flat[1].keys() and all(
        alike(value, flat[1][place], rounding) if isinstance(value, torch.Tensor) else value == flat[1][place]
        for place, value in flat[0].items()
    )


def alike(expected: torch.Tensor, got: torch.Tensor, rounding: float) -> bool:
    is_kind = (expected.shape, expected.dtype) == (got.shape, got.dtype)
    return is_kind and torch.allclose(got.to_dense(), expected.to_dense(), rounding, rounding)


@on_ranks()
def test_slices_are_stepped_saved_and_loaded_as_the_whole(rank: int, size: int) -> None:
    wrong = []
    for name, make_optimizer in MAKERS.items():
        plain, shared, loaded = Various(), Various(), Various()
        reference = make_optimizer(plain.groups())
        optim = ShardedOptimizer(shared.groups(), make_optimizer, world())
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.7) for each in (reference, optim)]
        for seed in range(3):
            for model, each, scheduler in zip((plain, shared), (reference, optim), schedulers, strict=True):
                model.draw_gradients(seed, "sparse" in name)
                each.step()
                each.zero_grad()
                scheduler.step()
        again = make_optimizer(loaded.groups())
        again.load_state_dict(reference.state_dict())  # which casts what counts steps
        pairs = [((list(plain.parameters()), reference), (list(shared.parameters()), optim))]
        for state in (reference.state_dict(), optim.local_state_dict()):  # what one process saved, and this one
            fresh = ShardedOptimizer(loaded.groups(), make_optimizer, world())
            fresh.load_state_dict(state)
            pairs.append((((), again), ((), fresh)))
        rounding = 1e-6 if "sparse" in name else 0.0  # entries of one row are added up in another order
        whole = optim.full_state_dict()
        is_whole = same(reference.state_dict(), whole, rounding) if rank == 0 else whole is None
        if not (is_whole and all(same(*((ps, each.state_dict()) for ps, each in pair), rounding) for pair in pairs)):
            wrong.append(name)
    assert wrong == []


class ScheduleFree(torch.optim.SGD):
    """SGD with methods of its own, of which one takes a norm."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)

    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad / parameter.grad.norm())

    def clear(self) -> None:
        self.zero_grad()


@on_ranks()
def test_methods_of_the_optimizers_own_work_on_the_whole(rank: int, size: int) -> None:
    model = make("awkward")
    expected = [each.detach() * 0.5 for each in model.parameters()]
    optim: Any = ShardedOptimizer(model.parameters(), lambda groups: ScheduleFree(groups, lr=0.1), world())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    with pytest.raises(ArgumentError) as caught:
        optim.first_step()
    optim.eval()
    same = all(map(torch.equal, model.parameters(), expected))
    optim.clear()
    assert same
    assert "reads gradients" in str(caught.value)
    assert all(each.grad is None for each in model.parameters())
