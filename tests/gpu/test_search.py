"""The search on a CUDA device: allocated bytes, and candidates that run out of memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.job import make_context
from atorch.auto.planner.dry_runs.trial import parked_on_host
from atorch.auto.planner.planner import search
from atorch.auto.strategy import METHODS, Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.distributed import world as worlds

pytestmark = pytest.mark.gpu


def context(model_device="cpu", **optim_args):
    world = worlds.init("cuda")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16)).to(model_device)
    ctx = make_context(
        model,
        torch.optim.AdamW,
        TensorDataset(torch.randn(256, 256), torch.randn(256, 16)),
        lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        dataloader_args={"batch_size": 64},
        optim_args=optim_args,
        world=world,
        cluster=ClusterSpec.detect(world),
    )
    return replace(ctx, call_model=lambda module, batch: module(batch[0]))


def ignore(progress):
    """Show nothing."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_allocated_bytes_are_measured_and_the_model_stays(device):
    ctx = context(device)
    before = {name: tensor.clone() for name, tensor in ctx.root.state_dict().items()}
    plan = search(ctx, excluded=["compile", "fp8"], progress=ignore)
    assert plan.measured is not None
    assert plan.measured.memory_kind == "allocated"
    weights = 4 * (256 * 1024 + 1024 * 16)
    assert plan.measured.peak_bytes > 3 * weights  # Adam's two states, and at least half of weights and gradients
    assert all(torch.equal(tensor, ctx.root.state_dict()[name]) for name, tensor in before.items())
    assert all(each.device.type == device and each.grad is None for each in ctx.root.parameters())


def test_a_model_on_the_device_takes_no_memory_of_it_while_strategies_are_tried():
    ctx = context("cuda")
    ctx.root.half_of_the_device = nn.Parameter(torch.zeros(1))
    memory = torch.cuda.get_device_properties(0).total_memory // 2
    ctx.root.half_of_the_device.data = torch.zeros(memory // 4, device="cuda")
    ctx.root.half_of_the_device.requires_grad_(False)
    with parked_on_host(ctx):
        assert torch.cuda.memory_allocated() < memory // 2
    assert torch.cuda.memory_allocated() >= memory


def test_running_out_of_memory_is_survived():
    @method("glutton", phase=Phase.STEP)
    class Glutton(Method):
        def cost(self, cost):
            return cost.replace(traffic_scale=0.0, ops_scale=0.0)

        def apply(self, ctx):
            torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
            return ctx

        @classmethod
        def choices(cls, profile, cluster):
            yield cls()

    try:
        plan = search(context(), excluded=["compile", "fp8"], progress=ignore)
        assert "glutton" not in plan.strategy.names()
        assert any(each.why == "failed" and "OutOfMemoryError" in each.reason for each in plan.rejected)
    finally:
        METHODS.remove("glutton")


def test_the_device_is_described():
    cluster = ClusterSpec.detect(worlds.init("cuda"))
    assert cluster.device.type == "cuda"
    assert cluster.device.capability == torch.cuda.get_device_capability()
    assert cluster.device.peak_flops["float16"] > cluster.device.peak_flops["float32"]
    assert cluster.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
