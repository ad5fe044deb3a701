"""Overriding a method of one module: stacked, copied, pickled and sharded."""

import copy
import io

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from atorch.model.wrapper import Wrapper, override
from tests.pool import on_ranks


def plus(forward, value):
    def added(self, x):
        return forward(self, x) + value

    return added


def times(call, value):
    def multiplied(self, x):
        return call(self, x) * value

    return multiplied


class Scale(nn.Module):
    """Doubles."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return x * self.factor


def overridden():
    module = Scale()
    override(module, "forward", plus, 1.0)
    override(module, "__call__", times, 10.0)
    return module


def test_overrides_stack_and_leave_the_class_alone():
    module = overridden()
    assert module(torch.tensor(3.0)).item() == 70.0
    assert module.forward(torch.tensor(3.0)).item() == 7.0
    assert Scale()(torch.tensor(3.0)).item() == 6.0
    assert (type(module).__name__, type(module).__doc__, str(type(module))) == ("Scale", "Doubles.", str(Scale))
    assert isinstance(module, Scale)


def test_copies_and_pickles_have_them_all():
    module = overridden()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), copy.copy(module), torch.load(file, weights_only=False)):
        assert twin(torch.tensor(3.0)).item() == 70.0
        assert isinstance(twin, Scale)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.factor.fill_(0.0)
    assert twin(torch.tensor(3.0)).item() == 10.0
    assert module(torch.tensor(3.0)).item() == 70.0


def test_a_slice_of_an_overridden_container_works():
    module = nn.Sequential(nn.Identity(), Scale(), Scale())
    override(module, "forward", plus, 1.0)
    assert module[1:](torch.tensor(3.0)).item() == 13.0


@on_ranks(2)
def test_sharding_between_overrides(rank, size):
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.ones_(module[0].weight)
    override(module, "forward", plus, 1.0)
    fully_shard(module)
    override(module, "__call__", times, 10.0)
    assert module(torch.ones(2)).tolist() == [30.0, 30.0]


class Transparent(Wrapper):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_module_around_a_wrapper_loads_what_it_saves():
    """Such as torch's AveragedModel of an accelerated model."""
    kinds = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2)
    saved, loaded = (nn.ModuleList(Transparent(copy.deepcopy(module)) for module in kinds) for _ in range(2))
    for parameter in loaded.parameters():
        parameter.data.zero_()
    loaded.load_state_dict(state := saved.state_dict())
    assert list(state) == [f"{index}.{name}" for index, module in enumerate(kinds) for name in module.state_dict()]
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert "0.module.bias" in loaded.load_state_dict({}, strict=False).missing_keys
