"""Copies of a structure: tensors are converted, what is shared stays shared, equal modules share their parts."""

import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from atorch.distributed.fake_world import fake_world
from atorch.errors import ArgumentError
from atorch.model.structure_copy import copy_structure, lazy_copy
from atorch.profiler.capture.fakes import Fakes


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)


def layers(number=3):
    return nn.ModuleList(Layer(index) for index in range(number))


def test_equal_modules_share_their_parts_and_are_their_own():
    model, converted = layers(), []
    copied = copy_structure(model, lambda tensor: converted.append(tensor) or tensor.clone(), [list(model)])
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


def test_without_equal_modules_all_are_copied():
    model = layers()
    copied = copy_structure(model, torch.clone)
    assert len({id(layer.linear) for layer in copied}) == 3
    assert [layer.index for layer in copied] == [0, 1, 2]
    model[0].linear.weight.data.zero_()
    assert copied[0].linear.weight.any()


def test_lazy_copies_are_written_apart():
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


def test_what_cannot_be_copied_is_named():
    model = layers(1)
    model.lock = threading.Lock()
    with pytest.raises(ArgumentError, match="cannot be copied"):
        copy_structure(model, torch.clone)


def split_linear():
    layer = nn.Linear(4, 6, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], run_check=False))
    return layer


def test_fakes_and_lazy_copies_are_of_the_part_of_a_dtensor_that_is_here():
    with fake_world(2, 1):
        layer = split_linear()
        assert layer.weight.shape == (6, 4)
        fake = copy_structure(layer, Fakes().fake)
        lazy = lazy_copy(layer, torch.device("cpu"))
    for copied in (fake, lazy):
        assert type(copied.weight.data) is not DTensor
        assert copied.weight.shape == (3, 4)
        assert copied.weight.requires_grad
    assert torch.equal(lazy.weight, torch.ones(3, 4))
