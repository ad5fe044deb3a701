"""Offload to pinned memory, and random numbers on a device that no argument is on: what only a GPU can show."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.runtime.memory import recompute
from atorch.runtime.memory.recompute import checkpoint_wrapper

pytestmark = pytest.mark.gpu


def test_offloaded_inputs_leave_the_device_and_are_pinned(monkeypatch):
    kept: list[Tensor] = []
    to_host = recompute._to_host

    def watched(tensor: Tensor) -> Any:
        packed = to_host(tensor)
        kept.append(packed[0])
        return packed

    monkeypatch.setattr(recompute, "_to_host", watched)
    width, rows = 256, 4096
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8))).cuda()
    held, grads = [], []
    for offload in (False, True):
        twin = copy.deepcopy(plain)
        for block in twin:
            checkpoint_wrapper(block, offload_to_cpu=offload)
        x = torch.randn(rows, width, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        before = torch.cuda.memory_allocated()
        loss = twin(x.requires_grad_()).sum()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        grads.append([p.grad for p in twin.parameters()])
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    inputs = [tensor for tensor in kept if tensor.numel()]  # torch's checkpoint hands over an empty one, too
    assert [tensor.is_pinned() for tensor in inputs] == [False] + [True] * 7  # the first input is a leaf
    assert held[0] - held[1] >= 6 * rows * width * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_the_same_where_no_argument_is_on_the_device(reentrant):
    class Moves(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.cuda())

    plain = Moves(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh()).cuda()
    twin = checkpoint_wrapper(copy.deepcopy(plain), reentrant=reentrant)
    x = torch.randn(32, 64)
    for module in (plain, twin):
        torch.manual_seed(3)
        module(x).square().sum().backward()
    for got, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_autocast_on_the_device_holds_in_the_recompute():
    plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    twin = checkpoint_wrapper(copy.deepcopy(plain), offload_to_cpu=True)
    x = torch.randn(32, 64, device="cuda")
    for module in (plain, twin):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = module(x * 2).float().square().sum()
        loss.backward()
    for got, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_selective_recomputation_draws_the_same_random_numbers_behind_fused_attention(dropout: float) -> None:
    from tests.runtime.memory.test_selective_recompute import Block, inputs

    torch.manual_seed(0)
    plain = Block(dropout).cuda().half()
    twin = checkpoint_wrapper(copy.deepcopy(plain), selective=True)
    grads = []
    for module in (plain, twin):
        torch.manual_seed(5)
        x = inputs().detach().cuda().half()
        module(x.requires_grad_()).float().square().sum().backward()
        grads.append([x.grad, *(p.grad for p in module.parameters())])
    for wanted, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
