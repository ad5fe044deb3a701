"""Copies follow every reference: nothing of the original takes part in a run of one, and equal modules share parts."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from atorch.distributed.local_collectives import fake_world
from atorch.errors import ArgumentError
from atorch.model.copy import copy_structure, duplicate, duplicate_with, lazy_copy
from atorch.profiler.fakes import Fakes
from tests.roads import BATCH, ROADS, WIDTH, Plain, net, through


def reached(root: Any) -> list[Any]:
    """Every object that is reached from `root`, not by names that functions look up in a run, and not by classes."""
    waiting, seen = [root], {}
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, types.ModuleType)):
            continue
        seen[id(each)] = each
        below = gc.get_referents(each)
        if isinstance(each, types.FunctionType):
            below = [below for below in below if below is not each.__globals__]
        waiting += below
    return list(seen.values())


@pytest.mark.parametrize("road", ROADS)
def test_a_copy_shares_no_module_and_no_tensor_with_its_original(road: str) -> None:
    model = net(road)
    copied = duplicate(model)
    own = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    assert not [type(each) for each in reached(copied) if id(each) in own]
    batch = torch.randn(BATCH, WIDTH)
    assert torch.equal(copied(batch), model(batch))
    copied(batch).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())
    before = model(batch)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(batch), before)
    assert not torch.equal(copied(batch), before)


@pytest.mark.parametrize("road", ROADS)
def test_every_tensor_is_converted_once(road: str) -> None:
    model, made = net(road), []

    def convert(tensor: Tensor) -> Tensor:
        made.append(tensor.clone())
        return made[-1]

    copied = duplicate(model, {}, convert)
    tensors = [each for each in reached(copied) if isinstance(each, Tensor)]
    parameters = {id(parameter) for parameter in copied.parameters()}
    assert len(made) == len({id(each) for each in tensors}), "the one tensor of a closure, too"
    assert parameters <= {id(each) for each in tensors}


def test_deepcopy_would_not_do() -> None:
    """What all this is for; a sceptic's check of the checks above."""
    model = net("ByLambda")
    copy.deepcopy(model)(torch.randn(BATCH, WIDTH)).sum().backward()
    assert model.blocks[0].mlp["fc"].weight.grad is not None


class Odd(nn.Module):
    """Every kind of reference at once."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc": nn.Linear(4, 4)})
        mlp, fc, count, seen = self.mlp, self.mlp["fc"], 0, []
        self.get = {"fc": fc}.get
        self.method = weakref.WeakMethod(self.forward)
        self.weak_keys = weakref.WeakKeyDictionary({fc: mlp})
        self.weak_values = weakref.WeakValueDictionary({"fc": fc})
        self.partial = functools.partial(through, mlp, x=None)
        self.leaf = torch.ones(4, requires_grad=True)
        fc.register_forward_hook(lambda module, args, output: seen.append(output))
        self.seen = lambda: seen

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        def again(x: Tensor, depth: int = 1) -> Tensor:
            return again(fc(x), depth - 1) if depth else x  # type: ignore[no-any-return]

        self.counted, self.again, self.recursive = counted, again, [self]
        self.recursive.append(self.recursive)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x) * self.leaf


def test_every_kind_of_reference_is_followed() -> None:
    model = Odd()
    copied = duplicate(model)
    fc = copied.mlp["fc"]
    assert copied.get("fc") is fc
    assert copied.method().__self__ is copied
    assert list(copied.weak_keys.items()) == [(fc, copied.mlp)]
    assert copied.weak_values["fc"] is fc
    assert copied.partial.args == (copied.mlp,)
    assert copied.partial.keywords == {"x": None}
    assert copied.recursive[0] is copied
    assert copied.recursive[1] is copied.recursive
    copied(torch.ones(1, 4)).sum().backward()
    assert copied.leaf.grad is not None
    assert model.leaf.grad is None
    assert (len(copied.seen()), len(model.seen())) == (1, 0), "what hooks keep is the copy's"
    assert [copied.counted(), copied.counted(), model.counted()] == [1, 2, 1], "what functions count, too"


def test_functions_that_reach_nothing_stay_themselves() -> None:
    model = nn.Linear(2, 2)
    lock = threading.Lock()
    model.act, model.locked, model.relu = functools.wraps(torch.relu)(lambda x: x), lambda: lock, torch.relu
    copied = duplicate(model)
    assert copied.locked is model.locked
    assert copied.relu is torch.relu
    model.held = lock
    with pytest.raises(TypeError, match="lock"):
        duplicate(model)


def test_what_a_closure_cannot_be_without_is_shared() -> None:
    model, lock = nn.Linear(2, 2), threading.Lock()

    class Service:
        """Holds the model, a lock and a list of threads, as trainers do."""

        def __init__(self) -> None:
            self.model, self.lock, self.threads = model, lock, [threading.current_thread()]

    service = Service()
    model.call = lambda x: service.model.weight
    copied = duplicate(model)
    mine = copied.call.__closure__[0].cell_contents
    assert mine.model is copied
    assert mine.lock is lock
    assert copied.call(None) is copied.weight


def test_what_the_memo_says_takes_its_place() -> None:
    model = ROADS["ByParameter"]()
    parameter = model.mlp["fc"].weight
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    copied = duplicate(model, {id(parameter): stand_in})
    assert copied.mlp["fc"].weight is stand_in
    copied(torch.randn(1, WIDTH)).sum().backward()
    assert stand_in.grad is not None


def test_functions_beside_the_model_reach_its_copy() -> None:
    model, other = Plain(), nn.Linear(2, 2)
    loss = lambda output: output.sum() + model.norm.weight.norm()  # noqa: E731
    copied, (own, criterion, plain, none) = duplicate_with(model, (loss, other, torch.sum, None))
    own(copied(torch.randn(1, WIDTH))).backward()
    assert model.norm.weight.grad is None
    assert copied.norm.weight.grad is not None
    assert criterion.weight is not other.weight
    assert plain is torch.sum
    assert none is None


def test_lazy_parts_of_torch_are_their_own() -> None:
    lstm = nn.LSTM(4, 4)
    copied = duplicate(lstm)
    assert all(found() is weight for found, weight in zip(copied._flat_weight_refs, copied._flat_weights, strict=True))
    assert copied._flat_weights[0] is copied.weight_ih_l0


class Says:
    """Its class says how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Says:
        return Says()


def test_what_says_how_it_is_copied_is_asked() -> None:
    model = nn.Linear(2, 2)
    model.own = Says()
    model.register_forward_hook(lambda *_: model.own and None)
    copied = duplicate(model)
    assert isinstance(copied.own, Says)
    assert copied.own is not model.own


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)


def layers(number: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Layer(index) for index in range(number))


def test_equal_modules_share_their_parts_and_are_their_own() -> None:
    model, converted = layers(), list[Tensor]()

    def convert(tensor: Tensor) -> Tensor:
        converted.append(tensor)
        return tensor.clone()

    copied = copy_structure(model, convert, [list(model)])
    assert len(converted) == 2  # a weight and a bias, of one layer
    first, second, third = copied
    assert first is not second
    assert first.linear is second.linear is third.linear
    assert first.linear is not model[0].linear
    handle = first.register_forward_hook(lambda *args: None)
    assert not second._forward_hooks
    handle.remove()
    first.forward = None
    assert "forward" not in vars(second)

    copied = copy_structure(model, torch.clone)  # without equal modules
    assert len({id(layer.linear) for layer in copied}) == 3
    assert [layer.index for layer in copied] == [0, 1, 2]
    model[0].linear.weight.data.zero_()
    assert copied[0].linear.weight.any()


def test_lazy_copies_are_written_apart() -> None:
    model = layers(1)
    model[0].linear.weight.custom = "mark"
    copied = lazy_copy(model, torch.device("cpu"))
    assert copied[0].linear.weight.custom == "mark"
    before = model[0].linear.weight.clone()
    with torch.no_grad():
        copied[0].linear.weight.zero_()
    assert torch.equal(model[0].linear.weight, before)
    meta = lazy_copy(layers(1).to("meta"), torch.device("cpu"))
    assert meta[0].linear.weight.any()


def test_what_cannot_be_copied_is_named() -> None:
    model = layers(1)
    model.lock = threading.Lock()
    with pytest.raises(ArgumentError, match="cannot be copied"):
        copy_structure(model, torch.clone)


def test_fakes_and_lazy_copies_are_of_the_part_of_a_dtensor_that_is_here() -> None:
    with fake_world(2, 1):
        layer, mesh = nn.Linear(4, 6, bias=False), init_device_mesh("cpu", (2,))
        layer.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False))
        assert layer.weight.shape == (6, 4)
        fake = copy_structure(layer, Fakes().fake)
        lazy = lazy_copy(layer, torch.device("cpu"))
    for copied in (fake, lazy):
        assert type(copied.weight.data) is not DTensor
        assert copied.weight.shape == (3, 4)
        assert copied.weight.requires_grad
    assert torch.equal(lazy.weight, torch.ones(3, 4))
