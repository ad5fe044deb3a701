"""What no machine without a GPU can show, and what most depends on it: run these first."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from atorch.auto.planner.planner import search
from atorch.runtime.gradients.clip import clip_grad_norm
from tests.gpu.test_chunk import in_chunks, loss_of, network, rows
from tests.gpu.test_search import context, ignore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

Interval = tuple[float, float]


def bits(model: nn.Module) -> dict[str, Any]:
    """Copies of all values, as bytes."""
    return {name: tensor.detach().cpu().view(torch.uint8) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_a_search_leaves_every_bit_of_a_model_on_the_device(kernel: str) -> None:
    """These optimizers write by address, past whatever watches a tensor."""
    ctx = context("cuda", **{kernel: True})
    before = bits(ctx.root)
    plan = search(ctx, excluded=["compile", "fp8"], progress=ignore)
    assert plan.measured is not None
    after = bits(ctx.root)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.device.type == "cuda" and parameter.grad is None for parameter in ctx.root.parameters())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipped_gradients_of_chunks_are_those_of_the_cpu(norm_type: float) -> None:
    """They are clipped in host memory, where copies may be under way."""
    model, _, _ = in_chunks(0.3)
    plain = network()
    for step in range(3):
        loss_of(model, rows(step).cuda()).backward()
        loss_of(plain, rows(step)).backward()
        norm, expected = (float(clip_grad_norm(each, 1e-3, norm_type)) for each in (model, plain))
        assert norm == pytest.approx(expected, rel=1e-4)
        again, held = (float(clip_grad_norm(each, 1e9, norm_type)) for each in (model, plain))
        assert again == pytest.approx(held, rel=1e-3)
        for each in (model, plain):
            each.zero_grad()


def test_copies_are_made_beside_computation() -> None:
    """Of what is copied while chunks come and go, at least half is hidden by kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    batch = rows().repeat(32, 1)  # enough to compute to hide behind
    model, optimizer, _ = in_chunks(0.3, batch=batch, prefetch=4)
    batch = batch.cuda()
    loss_of(model, batch).backward()
    optimizer.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        loss_of(model, batch).backward()
        torch.cuda.synchronize()
    events = [each for each in profiled.events() if each.device_type == DeviceType.CUDA]
    spans = [(each.time_range.start, each.time_range.end, "Memcpy" in each.name) for each in events]
    copies = [(start, end) for start, end, is_copy in spans if is_copy]
    kernels = joined([(start, end) for start, end, is_copy in spans if not is_copy])
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    assert hidden > 0.5 * sum(end - start for start, end in copies)


def joined(intervals: list[Interval]) -> list[Interval]:
    """Intervals of which none meets another."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
