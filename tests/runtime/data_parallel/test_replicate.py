"""Replication averages gradients like plain training on the whole batch, and speaks the user's names."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from atorch.errors import StrategyError
from atorch.runtime.data_parallel import replicate as module
from atorch.runtime.data_parallel.replicate import Replicated, average_before_steps, replicate
from tests.auto.training import assert_trains_like_plain
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import deviation, make, param_groups, sgd, train, world

CPU = torch.device("cpu")


@on_ranks()
def test_trains_as_one_process_does(rank: int, size: int) -> None:
    model = replicate(make("awkward", seed=rank), world(), CPU)  # rank 0's weights count
    train(model, sgd(param_groups(model)), rank, size, accumulate=2)
    copied = copy.deepcopy(model)  # as weights are averaged over steps
    assert all(map(torch.equal, copied.parameters(), model.parameters()))
    assert deviation(model, "awkward", accumulate=2) <= 1e-4


@on_ranks()
def test_names_and_attributes_are_the_users(rank: int, size: int) -> None:
    plain = make("awkward")
    model = replicate(make("awkward"), world(), CPU)
    assert isinstance(model, Replicated)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model.scale.fill_(9.0)
    model.load_state_dict(saved)
    model.eval()
    with pytest.raises(AttributeError, match="'Awkward' object has no attribute 'nothing'"):
        _ = model.nothing
    assert list(saved) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == ["shift"]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert float(model.scale.detach()) == 1.5
    assert model.config == {"width": 12}
    assert model.greet() == "width 12"
    assert model.get_submodule("blocks.1") is model.module.blocks[1]
    assert not any(module.training for module in model.module.modules())


def unchanged(rank: int, size: int) -> bool:
    model = make("awkward").requires_grad_(size == 1)
    return replicate(model, world(), CPU) is model


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_and_nothing_to_train_stay_as_they_are(pool: Pool, ranks: int) -> None:
    assert all(pool.run(unchanged, ranks=ranks))


class Halves(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return self.layers[which](x)


@on_ranks()
def test_unused_parameters_do_not_block(rank: int, size: int) -> None:
    model = replicate(Halves(), world(), CPU, find_unused_parameters=True)
    for which in (0, 1, 0):
        model.zero_grad()
        model(torch.full((1, 2), float(rank + 1)), which).sum().backward()
    assert float(model.layers[0].weight.grad[0, 0]) == 1.5


class TwoHeads(nn.Module):
    """A body and two heads, of which one can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden) + self.other(hidden)

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.body(x).tanh())


def ordinary(model: Any, x: torch.Tensor) -> None:
    model(x).mean().backward()


def retained(model: Any, x: torch.Tensor) -> None:
    output = model(x)
    output.mean().backward(retain_graph=True)
    output.square().mean().backward()


def two_forwards(model: Any, x: torch.Tensor) -> None:
    outputs = [model(x), model(2 * x)]
    for output in outputs:
        output.square().mean().backward()


def a_method(model: Any, x: torch.Tensor) -> None:
    model.second(x).square().mean().backward()


def a_submodule(model: Any, x: torch.Tensor) -> None:
    model.body(x).square().mean().backward()


def a_penalty(model: Any, x: torch.Tensor) -> None:
    model(x).mean().backward()
    sum(parameter.square().sum() for parameter in model.parameters()).backward()


def unfrozen(model: Any, x: torch.Tensor) -> None:
    model.other.requires_grad_(False)
    model(x).mean().backward()
    model.other.requires_grad_(True)
    model(x).square().mean().backward()


PASSES = {each.__name__: each for each in (retained, two_forwards, a_method, a_submodule, a_penalty, unfrozen)}


def gradients_of_passes(rank: int, size: int, name: str, find_unused: bool) -> float:
    """How far the gradients of unusual backward passes, over two rounds, are from those of the whole batch."""
    torch.manual_seed(3)
    whole, model = TwoHeads(), TwoHeads()
    model.load_state_dict(whole.state_dict())
    if name == "unfrozen":
        model.other.requires_grad_(False)  # when it is made
    x = torch.randn(4, 3)
    replicas = replicate(model, world(), CPU, find_unused_parameters=find_unused)
    off = []
    for backward in (PASSES[name], ordinary, PASSES[name]):
        backward(whole, x)
        backward(replicas, x[rank::size])
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None and theirs.grad is not None:
                off.append(float((mine.grad - theirs.grad).abs().max()))
    return max(off)


@pytest.mark.parametrize("find_unused", [False, True])
def test_every_backward_pass_averages(pool: Pool, find_unused: bool) -> None:
    assert_trains_like_plain(pool, gradients_of_passes, [(name, find_unused) for name in PASSES], band=1e-6)


def assigned(model: Any, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def edited(model: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.grad


class Beside:
    """A model, its twin as replicas, a batch, and an optimizer of each."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.whole, self.model = TwoHeads(), TwoHeads()
        self.model.load_state_dict(self.whole.state_dict())
        self.replicas = replicate(self.model, world(), CPU)
        self.optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.whole, self.model)]
        average_before_steps(self.optims[1], [self.replicas])
        self.x = torch.randn(4, 3)

    def step(self, rank: int, size: int, backward: Any) -> None:
        backward(self.whole, self.x)
        backward(self.replicas, self.x[rank::size])
        for optim in self.optims:
            optim.step()
            optim.zero_grad()


def farthest(model: nn.Module, whole: nn.Module) -> float:
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


@on_ranks()
def test_gradients_by_hand_are_averaged_before_a_step(rank: int, size: int) -> None:
    both, averaged = Beside(), []
    ordinary(both.replicas, both.x)
    both.optims[1].zero_grad()  # a pass that is thrown away
    with mock.patch.object(module, "average_gradients", wraps=module.average_gradients) as average:
        for backward in (assigned, edited, ordinary, assigned):
            both.step(rank, size, backward)
            averaged.append(average.call_count)
    assert farthest(both.model, both.whole) <= 1e-6
    assert averaged == [1, 1, 1, 2]


def added(model: Any, x: torch.Tensor, optim: torch.optim.Optimizer) -> Any:
    """Gradients of `torch.autograd.grad` in place, behind those of a backward pass."""
    model(x).mean().backward()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(x).square().mean(), parameters), strict=True):
        parameter.grad += gradient
    return optim.step()


def in_a_closure(model: Any, x: torch.Tensor, optim: torch.optim.Optimizer) -> Any:
    def closure() -> torch.Tensor:
        optim.zero_grad()
        assigned(model, x)
        return model(x).detach().square().mean()

    return optim.step(closure)


@on_ranks()
def test_gradients_that_were_taken_are_averaged(rank: int, size: int) -> None:
    for step in (added, in_a_closure):
        both = Beside()
        parts = (both.whole, both.x, both.optims[0]), (both.replicas, both.x[rank::size], both.optims[1])
        for _ in range(3):
            for each, part, optim in parts:
                step(each, part, optim)
                optim.zero_grad()
        assert farthest(both.model, both.whole) <= 1e-6, step


@on_ranks()
def test_parameters_that_come_later_are_averaged(rank: int, size: int) -> None:
    both = Beside()
    torch.manual_seed(3 + rank)
    for each in (both.whole, both.model):
        each.body = nn.Sequential(each.body, nn.Linear(4, 4))
    both.replicas.take_parameters(both.model.body.parameters())
    both.whole.body.load_state_dict(both.model.body.state_dict())
    for each, optim in zip((both.whole, both.model), both.optims, strict=True):
        optim.add_param_group({"params": each.body[1].parameters()})
    for backward in (ordinary, a_method, ordinary):
        both.step(rank, size, backward)
    assert farthest(both.model, both.whole) <= 1e-6


class Blocks(nn.Module):
    """Blocks in reentrant checkpoints, and heads of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x: torch.Tensor, heads: Any = (0, 1, 2), again: bool = False) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        for block in (*self.blocks, *(self.blocks[1:2] if again else ())):
            x = checkpoint(block, x, use_reentrant=True).tanh()
        return [self.heads[each](x) for each in heads]


def all_heads(model: Any, x: torch.Tensor, step: int) -> None:
    sum(model(x)).square().mean().backward()


def a_head_each(model: Any, x: torch.Tensor, step: int) -> None:
    first, second = model(x, heads=(0, 1))
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()


def accumulated(model: Any, x: torch.Tensor, step: int) -> None:
    with getattr(model, "no_sync", nullcontext)():
        model(x, heads=(0,))[0].square().mean().backward()
    model(x, heads=(1,))[0].square().mean().backward()


def stepped(optim: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optim.step()
    optim.zero_grad()


def a_step_in_backward(model: Any, x: torch.Tensor, step: int) -> None:
    if not step:
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(partial(stepped, torch.optim.AdamW([each], lr=0.1)))
    all_heads(model, x, step)


def signs(model: Any, x: torch.Tensor, step: int) -> None:
    """Gradients of two passes, each of which a hook makes signs of."""
    if not step:
        for each in model.parameters():
            each.register_hook(torch.sign)
    a_head_each(model, x, step)
    model(x, heads=(2,))[0].square().mean().backward()


def a_sample(model: Any, x: torch.Tensor, step: int) -> None:
    """Gradients of each sample, clipped."""

    def loss(values: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, values, (row[None],)).square().mean()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x)
    for name, parameter in model.named_parameters():
        parameter.grad = found[name].detach().clamp(-0.1, 0.1).mean(0)


LOOPS = {each.__name__: each for each in (all_heads, a_head_each, accumulated, a_step_in_backward, signs, a_sample)}


def off_after_steps(rank: int, size: int, name: str) -> float:
    """The distance of parameters from those of the whole batch, after a few steps of a loop."""
    torch.manual_seed(3)
    whole, model = (nn.Linear(3, 1), nn.Linear(3, 1)) if name == "a_sample" else (Blocks(), Blocks())
    model.load_state_dict(whole.state_dict())
    x = torch.randn(4, 4, 3)
    replicas = replicate(model, world(), CPU)
    optims = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (whole, model)]
    average_before_steps(optims[1], [replicas])
    for step, batch in enumerate(x):
        for each, part, optim in ((whole, batch, optims[0]), (replicas, batch[rank::size], optims[1])):
            LOOPS[name](each, part, step)
            optim.step()
            optim.zero_grad()
    return farthest(model, whole)


def test_loops_train_as_one_process_does(pool: Pool) -> None:
    assert_trains_like_plain(pool, off_after_steps, [(name,) for name in LOOPS], band=1e-5)


@on_ranks()
def test_what_a_rank_leaves_out_counts_as_zero(rank: int, size: int) -> None:
    model: Any = replicate(Blocks(), world(), CPU)
    for heads in ((0, 1, 2), (0, rank), (0, rank)):
        model.zero_grad()
        sum(model(torch.ones(1, 3), heads=heads)).sum().backward()
    assert [None if head.bias.grad is None else float(head.bias.grad) for head in model.heads] == [1.5, 0.5, None]


@on_ranks()
def test_hooks_on_gradients_see_averages_and_what_is_taken(rank: int, size: int) -> None:
    linear, seen = nn.Linear(1, 1, bias=False), list[float]()
    model: Any = replicate(linear, world(), CPU)
    linear.weight.register_hook(lambda gradient: seen.append(float(gradient)) or gradient.clamp(max=1.0))
    x = torch.full((1, 1), float(rank))
    with model.no_sync():
        model(x).sum().backward()
    model(x + 1).sum().backward()
    (taken,) = torch.autograd.grad(model(x + 2).sum(), linear.weight)
    assert [*seen, float(linear.weight.grad), float(taken)] == [[2.0, 2.0, 1.0, 1.0], [2.0, 3.0, 1.0, 1.0]][rank]


@on_ranks()
def test_what_reentrant_checkpoints_hide_is_refused(rank: int, size: int) -> None:
    for options, again, told in (
        ({"find_unused_parameters": True}, False, "find_unused_parameters=True does not see"),
        ({}, True, r"blocks.1.(weight|bias) is used in two reentrant checkpoints"),
    ):
        model: Any = replicate(Blocks(), world(), CPU, **options)
        with pytest.raises(StrategyError, match=told):
            sum(model(torch.ones(1, 3), again=again)).sum().backward()
