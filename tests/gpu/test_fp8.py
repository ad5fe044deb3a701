"""fp8 on a CUDA device: what real matmuls of each scaling compute, also compiled and on parts that are no multiple."""

import copy

import pytest
import torch
from torch import nn

from atorch.runtime.precision.fp8 import convert_linears
from atorch.runtime.precision.fp8_recipe import Fp8Recipe, Scaling

pytestmark = pytest.mark.gpu


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "rowwise_gw_hp"])
def test_outputs_and_gradients_are_near_those_of_bf16(scaling: Scaling, is_compiled: bool) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().bfloat16()
    model = copy.deepcopy(plain)
    report = convert_linears(model, recipe=Fp8Recipe(scaling=scaling), backend="torchao")
    assert not report.emulated
    assert len(report.converted) == 2
    run = torch.compile(model) if is_compiled else model
    x, gradient = (torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outputs = [layers(x) for layers in (plain, run)]
    for output in outputs:
        output.backward(gradient)
    assert 1e-3 < relative(outputs[1], outputs[0]) < 0.1
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert relative(one.grad, two.grad) < 0.15


def test_a_part_that_is_no_multiple_of_16_multiplies_in_its_own_dtype() -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(64, 48)).cuda().bfloat16()
    plain = copy.deepcopy(model)
    convert_linears(model, backend="torchao")
    for layers in (plain, model):
        layers[0].weight = nn.Parameter(layers[0].weight[:24].detach())
        layers[0].bias = nn.Parameter(layers[0].bias[:24].detach())
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(model(x), plain(x))
