"""Replication averages gradients like plain training on the whole batch, and speaks the user's names."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.data_parallel import replicate as module
from atorch.runtime.data_parallel.replicate import Replicated, average_before_steps, replicate
from tests.auto.training import assert_trains_like_plain
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import make, sgd, world

CPU = torch.device("cpu")


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
    copied = copy.deepcopy(model)  # as weights are averaged over steps
    assert all(map(torch.equal, copied.parameters(), model.parameters()))


class Scaled(nn.Module):
    """Its forward reads an attribute, as schedules of a temperature or of depth set it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.scale = nn.Linear(3, 3), nn.Linear(3, 2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.body(x)) + getattr(self, "shift", 0.0)


@on_ranks()
def test_attributes_and_modules_that_are_assigned_are_the_models(rank: int, size: int) -> None:
    model = replicate(Scaled(), world(), CPU)
    x = torch.full((2, 3), float(rank))
    before = model(x)
    model.scale, model.shift = 2.0, 1.0
    assert torch.allclose(model(x), 2 * before + 1)
    assert vars(model.module)["scale"] == 2.0

    torch.manual_seed(rank)  # rank 0's values count
    model.head = nn.Linear(3, 2)
    model.body.weight = nn.Parameter(torch.eye(3))
    model(x).square().sum().backward()
    for parameter in (model.head.weight, model.head.bias, model.body.weight, model.body.bias):
        both = [torch.empty_like(parameter) for _ in range(2 * size)]
        torch.distributed.all_gather(both[:size], parameter.detach())
        torch.distributed.all_gather(both[size:], parameter.grad)
        assert all(torch.equal(first, other) for first, other in zip(both[::2], both[1::2], strict=True))


@on_ranks()
def test_a_model_that_is_cast_later_is_refused(rank: int, size: int) -> None:
    model, x = replicate(Scaled(), world(), CPU), torch.ones(2, 3)
    model.to(CPU)
    model.body.weight.data = model.body.weight.data.clone()  # of the same device and dtype
    model(x).sum().backward()
    model.head.double()
    with pytest.raises(ArgumentError, match=r"shape \(2, 3\) was moved or cast after auto_accelerate"):
        model(x)


def unchanged(rank: int, size: int) -> bool:
    model = make("awkward").requires_grad_(size == 1)
    return replicate(model, world(), CPU) is model


def test_one_process_and_nothing_to_train_stay_as_they_are(pool: Pool) -> None:
    assert all(pool.run(unchanged, ranks=1) + pool.run(unchanged))


class Halves(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor, which: int) -> Any:
        return self.layers[which](x)


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


class Blocks(nn.Module):
    """Blocks in reentrant checkpoints, and heads of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, x: Tensor, heads: Any = (0, 1, 2), again: bool = False) -> list[Tensor]:
        x = x.detach().requires_grad_()
        for block in (*self.blocks, *(self.blocks[1:2] if again else ())):
            x = checkpoint(block, x, use_reentrant=True).tanh()
        return [self.heads[each](x) for each in heads]


Loop = Callable[[Any, Tensor, torch.optim.Optimizer, int], Any]
"""The work of a loop on a batch at a step, before the optimizer's step."""


def ordinary(model: Any, x: Tensor, *_: Any) -> None:
    model(x).mean().backward()


def retained(model: Any, x: Tensor, *_: Any) -> None:
    output = model(x)
    output.mean().backward(retain_graph=True)
    output.square().mean().backward()


def two_forwards(model: Any, x: Tensor, *_: Any) -> None:
    outputs = [model(x), model(2 * x)]
    for output in outputs:
        output.square().mean().backward()


def a_method(model: Any, x: Tensor, *_: Any) -> None:
    model.second(x).square().mean().backward()


def a_submodule(model: Any, x: Tensor, *_: Any) -> None:
    model.body(x).square().mean().backward()


def a_penalty(model: Any, x: Tensor, *_: Any) -> None:
    model(x).mean().backward()
    sum(parameter.square().sum() for parameter in model.parameters()).backward()


def unfrozen(model: Any, x: Tensor, *_: Any) -> None:
    model.other.requires_grad_(False)
    model(x).mean().backward()
    model.other.requires_grad_(True)
    model(x).square().mean().backward()


def assigned(model: Any, x: Tensor, optim: torch.optim.Optimizer, step: int) -> None:
    if not step:
        ordinary(model, x)  # a pass that is thrown away
        optim.zero_grad()
    parameters = list(model.parameters())
    found = torch.autograd.grad(model(x).square().mean(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient


def edited(model: Any, x: Tensor, *_: Any) -> None:
    model(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.grad


def added(model: Any, x: Tensor, *_: Any) -> None:
    """Gradients of `torch.autograd.grad` in place, behind those of a backward pass."""
    model(x).mean().backward()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(x).square().mean(), parameters), strict=True):
        parameter.grad += gradient


def in_a_closure(model: Any, x: Tensor, optim: torch.optim.Optimizer, step: int) -> None:
    def closure() -> Tensor:
        optim.zero_grad()
        assigned(model, x, optim, 1)
        return model(x).detach().square().mean()

    optim.step(closure)
    optim.zero_grad()


def all_heads(model: Any, x: Tensor, *_: Any) -> None:
    sum(model(x)).square().mean().backward()


def a_head_each(model: Any, x: Tensor, *_: Any) -> None:
    first, second = model(x, heads=(0, 1))
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()


def accumulated(model: Any, x: Tensor, *_: Any) -> None:
    with getattr(model, "no_sync", nullcontext)():
        model(x, heads=(0,))[0].square().mean().backward()
    model(x, heads=(1,))[0].square().mean().backward()


PASSES: Sequence[Loop] = (retained, two_forwards, a_method, a_submodule, a_penalty, unfrozen)

LOOPS: list[tuple[Any, Sequence[Loop]]] = [
    (TwoHeads, (added,) * 3),
    (TwoHeads, (in_a_closure,) * 3),
    *((Blocks, (loop,) * 4) for loop in (all_heads, a_head_each, accumulated)),
]


def farthest(mine: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> float:
    pairs = list(zip(mine, theirs, strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def off_after_steps(rank: int, size: int, make: Any, loops: Sequence[Loop]) -> float:
    """The distance of parameters from those of the whole batch, after a step of each loop."""
    torch.manual_seed(3)
    whole, model = make(), make()
    model.load_state_dict(whole.state_dict())
    replicas = replicate(model, world(), CPU)
    optims = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (whole, model)]
    average_before_steps(optims[1], [replicas])
    for step, loop in enumerate(loops):
        batch = torch.randn(4, 3)
        for each, part, optim in ((whole, batch, optims[0]), (replicas, batch[rank::size], optims[1])):
            loop(each, part, optim, step)
            optim.step()
            optim.zero_grad()
    return farthest(model.parameters(), whole.parameters())


def test_gradients_that_were_taken_are_averaged_and_loops_train_as_one_process_does(pool: Pool) -> None:
    assert_trains_like_plain(pool, off_after_steps, LOOPS, band=1e-5)


@on_ranks()
def test_gradients_by_hand_are_averaged_before_a_step(rank: int, size: int) -> None:
    with mock.patch.object(module, "average_gradients", wraps=module.average_gradients) as average:
        assert off_after_steps(rank, size, TwoHeads, (assigned, edited, ordinary, assigned)) <= 1e-5
    assert average.call_count == 2, "those that were assigned"


def gradients_of_passes(rank: int, size: int, backward: Loop, find_unused: bool) -> float:
    """The distance of gradients of unusual backward passes, over three rounds, from those of the whole batch."""
    torch.manual_seed(3)
    whole, model = TwoHeads(), TwoHeads()
    model.load_state_dict(whole.state_dict())
    model.other.requires_grad_(backward is not unfrozen)  # when it is made
    x, off = torch.randn(4, 3), []
    replicas, optim = replicate(model, world(), CPU, find_unused_parameters=find_unused), sgd(whole.parameters())
    for step, each in enumerate((backward, ordinary, backward)):
        each(whole, x, optim, step)
        each(replicas, x[rank::size], optim, step)
        off.append(farthest(*([p.grad for p in both.parameters()] for both in (model, whole))))
    return max(off)


def test_every_backward_pass_averages(pool: Pool) -> None:
    cases = [(each, find_unused) for each in PASSES for find_unused in (False, True)]
    assert_trains_like_plain(pool, gradients_of_passes, cases, band=1e-6)


@on_ranks()
def test_parameters_that_come_later_are_averaged(rank: int, size: int) -> None:
    torch.manual_seed(3)
    whole, model = TwoHeads(), TwoHeads()
    model.load_state_dict(whole.state_dict())
    replicas = replicate(model, world(), CPU)
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
    average_before_steps(optims[1], [replicas])
    x = torch.randn(4, 3)
    torch.manual_seed(3 + rank)
    for each in (whole, model):
        each.body = nn.Sequential(each.body, nn.Linear(4, 4))
    replicas.take_parameters(model.body.parameters())
    whole.body.load_state_dict(model.body.state_dict())
    for each, optim in zip((whole, model), optims, strict=True):
        optim.add_param_group({"params": each.body[1].parameters()})
    for backward in (ordinary, a_method, ordinary):
        for each, part, optim in ((whole, x, optims[0]), (replicas, x[rank::size], optims[1])):
            backward(each, part)
            optim.step()
            optim.zero_grad()
    assert farthest(model.parameters(), whole.parameters()) <= 1e-6


@on_ranks()
def test_what_a_rank_leaves_out_counts_as_zero_and_hooks_see_averages(rank: int, size: int) -> None:
    model: Any = replicate(Blocks(), world(), CPU)
    for heads in ((0, 1, 2), (0, rank), (0, rank)):
        model.zero_grad()
        sum(model(torch.ones(1, 3), heads=heads)).sum().backward()
    assert [None if head.bias.grad is None else float(head.bias.grad) for head in model.heads] == [1.5, 0.5, None]
    model = replicate(Halves(), world(), CPU, find_unused_parameters=True)
    for which in (0, 1, 0):
        model.zero_grad()
        model(torch.full((1, 2), float(rank + 1)), which).sum().backward()
    assert float(model.layers[0].weight.grad[0, 0]) == 1.5
    linear, seen = nn.Linear(1, 1, bias=False), list[float]()
    model = replicate(linear, world(), CPU)
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
