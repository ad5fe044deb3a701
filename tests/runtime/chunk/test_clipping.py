"""The norm of gradients in chunks is that of the model's gradients, and clipping scales what the chunks keep."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch.runtime.chunk.clipping import clip_chunked
from atorch.runtime.clip import clip_grads
from tests.runtime.chunk.stand_in import chunks_of, give_gradients, random_gradients


def make_net():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3))
    net[2].bias.requires_grad = False
    return net


def clipped(norm_type, max_norm, group=None, but=("1.bias",), dtype=None):
    """The norm and the gradients of a model by itself, and of one in chunks."""
    plain, net = make_net(), make_net()
    gradients = random_gradients(plain, 1, but=["1.weight"])
    for name, gradient in gradients.items():
        plain.get_parameter(name).grad = gradient.clone()
    chunks = chunks_of(net, 40, but=but, group=group, dtype=dtype)
    give_gradients(net, chunks, gradients)
    norm = clip_grads(plain.parameters(), max_norm, norm_type)
    mine = clip_chunked(chunks, net.parameters(), max_norm, norm_type)
    kept = {}
    for name, parameter in net.named_parameters():
        place = chunks.place(parameter)
        kept[name] = parameter.grad if place is None else place[0].gradient_of(place[1])
    return norm, mine, {name: parameter.grad for name, parameter in plain.named_parameters()}, kept, chunks


@pytest.mark.parametrize("max_norm", [1e-3, 1e9])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_same_bits_as_without_chunks(norm_type, max_norm):
    norm, mine, theirs, kept, _ = clipped(norm_type, max_norm)
    assert torch.equal(norm, mine)
    assert norm > 1e-2
    for name, gradient in theirs.items():
        assert kept[name] is gradient is None or torch.equal(kept[name], gradient), name


def test_norms_of_halves_are_in_fp32():
    norm, mine, _, kept, _ = clipped(2.0, 1e-3, but=(), dtype=torch.float16)
    assert mine.dtype == torch.float32
    assert abs(mine / norm - 1) < 1e-2
    total = math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in kept.values() if gradient is not None))
    assert abs(total / 1e-3 - 1) < 2e-2


def shared(rank, size, norm_type):
    norm, mine, theirs, kept, chunks = clipped(norm_type, 1e-3, dist.group.WORLD)
    for name, gradient in kept.items():
        spec = next((chunk for chunk in chunks.chunks for slot in chunk.spec.slots if slot.name == name), None)
        if gradient is None or spec is None:
            continue
        slot = next(slot for slot in spec.spec.slots if slot.name == name)
        part = theirs[name].flatten()[spec.within(slot)]
        torch.testing.assert_close(gradient.flatten(), part, rtol=1e-6, atol=0)
    return float(norm), float(mine)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_shares_have_the_norm_of_the_whole(pool, norm_type):
    (norm, first), (_, second) = pool.run(shared, norm_type)
    assert first == second == pytest.approx(norm, rel=1e-6)
