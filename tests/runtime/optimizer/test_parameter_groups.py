"""An optimizer is given more parameters of its model, and no others."""

import copy

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.optimizer.user_optimizer import keep_to


class Taking(nn.Sequential):
    def take_parameters(self, parameters):
        self.taken = list(parameters)


def kept(kind=Taking):
    model = kind(nn.Linear(2, 2), nn.Linear(2, 2))
    optim = torch.optim.SGD(model[0].parameters(), lr=0.1)
    keep_to(model, optim)
    return model, optim


GROUPS = [lambda module: module.parameters(), lambda module: module.weight, lambda module: [("w", module.weight)]]


@pytest.mark.parametrize("group", GROUPS[:2])
def test_parameters_of_the_model_are_taken(group):
    model, optim = kept()
    model.append(nn.Linear(2, 3))
    for module in (model[1], model[2]):
        optim.add_param_group({"params": group(module), "lr": 0.2})
    assert optim.param_groups[2]["params"][0] is model.taken[0] is model[2].weight
    assert [each["lr"] for each in optim.param_groups] == [0.1, 0.2, 0.2]


@pytest.mark.parametrize("group", GROUPS)
def test_other_parameters_are_refused_but_by_a_copy(group):
    _, optim = kept()
    with pytest.raises(ArgumentError, match="optim.add_param_group was given a parameter of shape .* submodule of it"):
        optim.add_param_group({"params": group(nn.Linear(2, 3))})
    for what_torch_refuses in ({"params": [3]}, [3]):
        with pytest.raises(TypeError):
            optim.add_param_group(what_torch_refuses)
    assert len(optim.param_groups) == 1
    twin = copy.deepcopy(optim)
    twin.add_param_group({"params": nn.Linear(2, 3).parameters()})
    assert len(twin.param_groups) == 2


def test_later_ones_are_refused_where_nothing_reduces_them():
    model, optim = kept(nn.Sequential)
    model.append(nn.Linear(2, 3))
    optim.add_param_group({"params": model[1].parameters()})
    with pytest.raises(ArgumentError, match="did not have when it was accelerated"):
        optim.add_param_group({"params": model[2].parameters()})
