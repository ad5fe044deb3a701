"""Fakes have no memory; integers that are known have values all the same."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from atorch.errors import ArgumentError
from atorch.profiler.fakes import Fakes


@pytest.fixture
def fakes():
    return Fakes()


def test_fakes_are_like_what_they_stand_for(fakes):
    for real in (torch.ones(2, 3).T, torch.ones(4, dtype=torch.long), torch.ones(2, device="meta")):
        fake = fakes.fake(real)
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device.type) == (
            real.shape, real.stride(), real.dtype, "cpu",
        )  # fmt: skip
    assert fakes.fake(torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(ArgumentError, match="no fakes of tensors of layout torch.jagged"):
        fakes.fake(torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged))


def test_integers_of_a_batch_keep_their_values(fakes):
    tokens = torch.tensor([1, 2, 3])
    known = fakes.fake_unless_known(tokens)
    with fakes.running():
        assert (known > 0).all()
        positions = torch.arange(3)[None, :]
        assert not isinstance(positions, FakeTensor)
        assert positions.diff().eq(1).all()
        known[0] = 7
    assert tokens[0] == 1
    for unknown in (torch.ones(3), tokens.to("meta")):
        assert isinstance(fakes.fake_unless_known(unknown), FakeTensor)


def test_values_that_are_known_and_that_take_memory(fakes):
    weight, tokens = fakes.fake(torch.ones(8, 4)), torch.tensor([1, 2])
    with fakes.running():
        found = functional.embedding(tokens, weight)
    assert isinstance(found, FakeTensor)
    assert found.shape == (2, 4)

    with fakes.running():
        positions = torch.arange(2**20)
        assert not isinstance(positions, FakeTensor)
        assert isinstance(positions[:, None] < positions[None, :], FakeTensor)
        assert isinstance(torch.arange(2**40), FakeTensor)

    # As transformers looks at them, to leave out the mask of sequences that are not packed.
    with fakes.running():
        positions = torch.arange(2048)[None, :].expand(16, -1)
        packed = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        assert (packed[:, -1] == 0).all()
        every = (positions.reshape(-1) % 2 == 0).nonzero()  # as many as the values say
        assert isinstance(every, FakeTensor) or every.shape == (2**14, 1)

    data, weight = (fakes.fake(each).requires_grad_() for each in (torch.ones(6, 4), torch.ones(2, 4, 8)))
    with fakes.running():
        out = functional.grouped_mm(data, weight, offs=torch.tensor([2, 6], dtype=torch.int32))
    assert (out.shape, out.dtype, out.requires_grad) == ((6, 8), torch.float32, True)
