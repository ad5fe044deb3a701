"""Memory of tensors: copies in which views stay views, and memory that is given up and comes back."""

import torch
from torch import nn

from atorch.model.copy import SMALL
from atorch.model.copy_isolation import OwnMemory, make_writable, released, storage_of


def at_once(device):
    return False


def test_views_of_one_memory_stay_views_of_one_memory():
    memory = torch.arange(12.0)
    whole, part, turned = memory.view(3, 4), memory[4:8], memory.view(3, 4).t()
    copied = OwnMemory(at_once)
    others = [copied(each) for each in (whole, part, turned)]
    for mine, other in zip((whole, part, turned), others, strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()
    others[0][1].fill_(-1.0)
    assert torch.equal(others[1], torch.full((4,), -1.0))
    assert torch.equal(others[2][:, 1], others[1])
    assert torch.equal(memory, torch.arange(12.0))


def test_an_expanded_tensor_stays_expanded():
    copied = OwnMemory(at_once)(torch.ones(1, 3).expand(1000, 3))
    assert copied.stride() == (0, 1)
    assert copied.untyped_storage().nbytes() == 12


def test_what_lies_elsewhere_is_shared_until_it_is_written():
    tensor = torch.ones(SMALL + 1)
    copied = OwnMemory(lambda device: True)(tensor)
    assert torch._C._is_cow_tensor(copied)
    copied.zero_()
    assert tensor.all()


def test_a_sparse_tensor_is_copied_too():
    tensor = torch.eye(3).to_sparse()
    assert storage_of(tensor) is None
    assert torch.equal(OwnMemory(at_once)(tensor).to_dense(), torch.eye(3))


def test_memory_that_is_given_up_comes_back_for_every_view():
    memory = torch.arange(6.0)
    parameter, tied = nn.Parameter(memory[:4]), memory[2:]
    version = parameter._version
    with released([parameter, tied]) as values:
        assert memory.untyped_storage().nbytes() == 0
        copied = OwnMemory(at_once, values)(tied)
        assert torch.equal(copied, torch.arange(2.0, 6.0))
        copied.zero_()
    assert torch.equal(memory, torch.arange(6.0))
    assert parameter._version == version


def test_an_expanded_tensor_gets_places_of_its_own_but_for_a_view_of_another():
    alone, scale = torch.ones(1, 3).expand(4, 3), torch.ones(1, 3)
    view = scale.expand(4, 3)
    make_writable([alone, scale, view])
    alone[0] = 2.0
    assert alone.sum() == 15.0
    scale.fill_(5.0)
    assert (view == 5.0).all()
