"""How far gradients are from a sample: rounding turns them a little, what is wrong is along them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atorch.runtime.gradients.gradient_check import farthest, sample_of


def pair() -> nn.ModuleList:
    """Two layers of one shape, with gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    for layer in layers:
        layer.weight.grad = torch.randn(8, 8)
    return layers


def test_rounding_by_many_layers_counts_less_than_what_is_lost_or_taken_twice() -> None:
    layers = pair()
    sample = sample_of(layers)
    plain = [layer.weight.grad.clone() for layer in layers]
    for place, grad in enumerate(plain):  # across: nothing of it along the sample
        noise, (name, elements) = torch.randn(8, 8), list(sample.items())[place]
        across = noise.reshape(-1)[elements.places]
        across -= (across @ elements.values) / elements.values.square().sum() * elements.values
        across *= 0.8 * elements.values.norm() / across.norm()
        layers[place].weight.grad = grad.reshape(-1).index_add(0, elements.places, across).reshape(8, 8)
        assert name == f"{place}.weight"
    assert farthest(layers, sample)[0] == pytest.approx(0.8, rel=1e-4)
    assert farthest(layers, sample, noise=4.0)[0] == pytest.approx(0.2, rel=1e-4)
    for damaged in ([0.5 * plain[0], plain[1]], [2 * plain[0], plain[1]], [-plain[0], plain[1]], plain[::-1]):
        for layer, grad in zip(layers, damaged, strict=True):
            layer.weight.grad = grad
        assert farthest(layers, sample, noise=4.0)[0] > 0.4, "beyond the band of bf16"
