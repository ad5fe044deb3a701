"""Layer normalization is torch's wherever apex's kernel is not."""

import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import atorch.smp as smp
from atorch import logs
from atorch.smp.nn import layers

SHAPES: list[Any] = [6, (6,), [3, 6], torch.Size([2, 3, 6])]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_gradients_and_state_are_torchs(shape: Any, affine: bool) -> None:
    plain, fused = nn.LayerNorm(shape, 1e-3, affine), smp.nn.FusedLayerNorm(shape, 1e-3, affine)
    assert list(fused.state_dict()) == list(plain.state_dict()) == (["weight", "bias"] if affine else [])
    for each in plain.parameters():
        nn.init.normal_(each)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(4, 2, 3, 6)
    given = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(each) for module, each in zip((plain, fused), given, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.pow(3).sum().backward()
    assert torch.equal(given[0].grad, given[1].grad)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("affine", [True, False])
def test_apexs_kernel_is_called_on_cuda(monkeypatch: pytest.MonkeyPatch, affine: bool) -> None:
    calls: list[str] = []
    apex = types.ModuleType("apex.normalization.fused_layer_norm")

    def fused_layer_norm(input: Tensor, shape: Any, eps: float = 1e-6) -> Tensor:
        calls.append("plain")
        return F.layer_norm(input, shape, eps=eps)

    def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float = 1e-6) -> Tensor:
        calls.append("affine")
        return F.layer_norm(input, shape, weight, bias, eps)

    vars(apex).update(fused_layer_norm=fused_layer_norm, fused_layer_norm_affine=fused_layer_norm_affine)
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, apex.__name__, apex)
    module, plain, x = smp.nn.FusedLayerNorm(4, 0.1, affine), nn.LayerNorm(4, 0.1, affine), torch.randn(3, 4)
    assert torch.equal(module(x), plain(x))
    assert calls == []
    monkeypatch.setattr(layers, "_is_cuda", lambda input: True)
    assert torch.equal(module(x), plain(x))
    assert calls == ["affine" if affine else "plain"]


def test_that_it_is_torchs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logs.say_once.cache_clear()
    with caplog.at_level(logging.INFO, "atorch"):
        for _ in range(3):
            smp.nn.FusedLayerNorm(4)
    assert len([message for message in caplog.messages if "FusedLayerNorm is torch's" in message]) == 1
