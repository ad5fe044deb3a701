"""Replacements on CUDA agree with what they replace, and fp8 layers run there."""

import copy

import pytest
import torch
from torch import nn

from atorch.runtime.fused import FusedRMSNorm, Variant, fuse_cross_entropy, fuse_layer_norms
from atorch.runtime.fused.attention import fuse_multihead_attention
from atorch.runtime.precision.fp8 import convert_linears
from atorch.runtime.precision.fp8_recipe import MIN_CAPABILITY, Fp8Recipe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", [Variant(0.0, True), Variant(1.0, False)])
def test_rms_norm_is_that_of_the_cpu(variant: Variant, dtype: torch.dtype) -> None:
    weight, x = torch.randn(64), torch.randn(8, 64)
    results = []
    for device in ("cpu", "cuda"):
        module = FusedRMSNorm(nn.Parameter(weight.to(device, dtype)), 1e-5, variant)
        inputs = x.to(device, dtype).requires_grad_()
        output = module(inputs)
        assert output.dtype == dtype
        grads = torch.autograd.grad(output.float().square().sum(), (inputs, module.weight))
        results.append([each.detach().float().cpu() for each in (output, *grads)])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * one.norm()


def test_multihead_attention_takes_less_memory() -> None:
    x = torch.randn(2, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plain = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4, batch_first=True)}).to("cuda", torch.bfloat16)
    fused = copy.deepcopy(plain)
    fuse_multihead_attention(fused)
    peaks, outputs = [], []
    for model in (plain, fused):
        torch.cuda.reset_peak_memory_stats()
        output = model["attention"](x, x, x)[0]
        output.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        outputs.append(output.detach())
    assert peaks[1] < peaks[0] / 2
    assert torch.allclose(*outputs, atol=2e-2)


def test_layer_norm_by_apex() -> None:
    pytest.importorskip("apex.normalization")
    model = nn.Sequential(nn.LayerNorm(64)).cuda()
    x = torch.randn(4, 64, device="cuda")
    before = model(x)
    assert len(fuse_layer_norms(model, torch.device("cuda")).swapped) == 1
    assert torch.allclose(model(x), before, atol=1e-5)


def test_cross_entropy_by_liger() -> None:
    pytest.importorskip("liger_kernel")
    model = nn.Sequential(nn.CrossEntropyLoss(ignore_index=3))
    logits, target = torch.randn(32, 100, device="cuda"), torch.randint(100, (32,), device="cuda")
    before = model[0](logits, target)
    assert len(fuse_cross_entropy(model, torch.device("cuda")).swapped) == 1
    assert torch.allclose(model[0](logits.clone(), target), before, atol=1e-5)


@pytest.mark.parametrize("backend", ["te", "torchao"])
def test_fp8_is_near_bf16(backend: str) -> None:
    pytest.importorskip("transformer_engine.pytorch" if backend == "te" else "torchao")
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        pytest.skip("needs compute capability 8.9")
    plain = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
    fp8 = copy.deepcopy(plain)
    report = convert_linears(fp8, backend=backend, recipe=Fp8Recipe())  # type: ignore[arg-type]
    assert report.converted == ("0", "2")
    assert not report.emulated
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # delayed scaling has seen nothing in the first step
        outputs = plain(x), fp8(x)
        for output in outputs:
            output.float().square().mean().backward()
    assert (outputs[0] - outputs[1]).float().norm() <= 0.1 * outputs[0].float().norm()
    assert fp8[0].weight.grad is not None
